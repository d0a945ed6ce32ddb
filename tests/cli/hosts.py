"""Hosts on this machine: each has a network namespace with an address of its own on one bridge, a name, and a view of one
folder that is its own. All of it goes when its processes end. Needs root and iproute2.

    with Hosts(tmp_path, 3) as hosts:
        hosts.folder(1)               what host 1 sees as hosts.local
        hosts.mpirun([1, 1, 1], program, "norms", hosts.local / "dump")
"""

import os
import pathlib
import shutil
import subprocess
import sys

import conftest

NETWORK = "10.203.77"


def why_not():
    """Why there can be no hosts here; empty: there can."""
    if os.geteuid() != 0:
        return "hosts in network namespaces need root"
    if not all(shutil.which(tool) for tool in ("ip", "unshare", "nsenter", "mount")):
        return "hosts in network namespaces need ip, unshare, nsenter and mount"
    tried = subprocess.run(["unshare", "-n", "-m", "-u", "ip", "link", "add", "gradclip0", "type", "bridge"],
                           capture_output=True, text=True)
    return "" if tried.returncode == 0 else f"no network namespaces here: {tried.stderr.strip()}"


class Hosts:
    def __init__(self, path, count):
        self.path, self.local = pathlib.Path(path) / "hosts", pathlib.Path(path) / "hosts" / "local"
        self.names = [f"node{number}" for number in range(count)]
        self.holders = []

    def folder(self, number):
        return self.path / self.names[number]

    def __enter__(self):
        for folder in [self.local, *map(self.folder, range(len(self.names)))]:
            folder.mkdir(parents=True)
        (self.path / "etc_hosts").write_text("127.0.0.1 localhost\n" + "".join(
            f"{NETWORK}.{number + 1} {name}\n" for number, name in enumerate(self.names)))
        try:
            switch = self._hold(["unshare", "-n", "--kill-child", "--fork"], "ip link add bridge type bridge && "
                                "ip link set bridge up")
            for number, name in enumerate(self.names):
                holder = self._hold(
                    ["unshare", "-n", "-m", "-u", "--kill-child", "--fork"],
                    f"hostname {name} && mount --make-rprivate / && mount --bind '{self.folder(number)}' '{self.local}' "
                    f"&& mount --bind '{self.path}/etc_hosts' /etc/hosts && ip link set lo up")
                for command in (f"link add port{number} type veth peer name eth0 netns {holder}",
                                f"link set port{number} master bridge up"):
                    subprocess.run(["nsenter", "-t", str(switch), "-n", "ip", *command.split()], check=True)
                for command in (f"addr add {NETWORK}.{number + 1}/24 dev eth0", "link set eth0 up"):
                    subprocess.run(["nsenter", "-t", str(holder), "-n", "ip", *command.split()], check=True)
                (self.path / f"{name}.pid").write_text(str(holder))
            # As ssh is called: a host, then words that its shell gets as one line.
            agent = self.path / "agent"
            agent.write_text(f"#!/bin/sh\nhost=$1; shift\nexec nsenter -t $(cat '{self.path}'/$host.pid) -n -m -u -- "
                             "sh -c \"$*\"\n")
            agent.chmod(0o755)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _hold(self, unshare, command):
        """A process that keeps the namespaces; they go with it."""
        process = subprocess.Popen([*unshare, "sh", "-c", f"{command} && echo $$ && exec sleep 600"],
                                   stdout=subprocess.PIPE, text=True)
        self.holders.append(process)
        said = process.stdout.readline().strip()
        assert said, "a host did not start"
        return int(said)

    def __exit__(self, *unused):
        for process in self.holders:
            process.kill()
        for process in self.holders:
            process.wait()
            process.stdout.close()

    def mpirun(self, slots, program, *args):
        """The program with slots[i] processes on host i, started on host 0 by Open MPI through its remote agent."""
        where = ",".join(f"{name}:{count}" for name, count in zip(self.names, slots) if count)
        command = ["mpirun", "-q", "--allow-run-as-root", "--host", where, "-np", str(sum(slots)),
                   "--mca", "plm_rsh_agent", str(self.path / "agent"), "--mca", "plm_rsh_no_tree_spawn", "1",
                   "--mca", "btl", "self,vader,tcp", "--mca", "oob_tcp_if_include", f"{NETWORK}.0/24",
                   "--mca", "btl_tcp_if_include", f"{NETWORK}.0/24"]
        first = ["nsenter", "-t", (self.path / f"{self.names[0]}.pid").read_text(), "-n", "-m", "-u", "--"]
        env = {key: value for key, value in conftest.environment().items() if key != "OMPI_MCA_btl"}
        return conftest.execute([*first, *command, program, *args], env=env)


if __name__ == "__main__":
    print(why_not() or "hosts can be made here")
    sys.exit(0)
