#!/bin/sh
# mpirun.sh LAUNCHER ARGUMENTS: with a directory for its sessions of its own. In the one that all launches of a machine share,
# one that ends may remove it while another is about to make its own in it, which then fails.
sessions=$(mktemp -d "${TMPDIR:-/tmp}/gradclip-mpi-XXXXXXXX") || exit 1
trap 'rm -rf "$sessions"' EXIT
OMPI_MCA_orte_tmpdir_base=$sessions "$@"
