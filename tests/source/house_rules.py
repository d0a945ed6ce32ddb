"""House rules of docs/architecture.md that neither compiler nor linker enforces. Each function returns complaints."""

import collections
import re

SUFFIXES = (".hpp", ".cpp", ".cu", ".inl")

# A foreign header has one place (rule 4). What is not listed here may be included anywhere.
PLACES = {
    "mpi.h": {"src/comm/mpi_communicator.cpp"},
    "nccl.h": {"src/comm/nccl_communicator.cpp"},
    "cuda_runtime.h": {"src/cuda_runtime/launch.hpp"},
    "cuda_runtime_api.h": {"src/cuda_runtime/cuda_runtime.hpp", "src/backend/cuda/kernels.hpp"},
    "hdf5.h": {"src/dump/hdf5_call.hpp"},
    "zlib.h": {"src/dump/chunk_filters.cpp"},
    "re2/re2.h": {"src/dump/manifest.cpp", "src/analysis/name_map.cpp"},
}

NAMESPACE = re.compile(r"(?:inline )?namespace(?: ([\w:]+))? \{")
DEFINITION = re.compile(r"(?:template <.*> )?(?:struct|class|enum class|union) (?:alignas\(.*?\) )?(\w+)(?![\w:<])[^;]*(?:\{.*|:.*|)$")


def doubly_defined(files):
    """Two classes of one name in one namespace: no error of a linker, which takes the members of either for both.
    `files` is {path: text}, formatted by clang-format, so that what is in a namespace begins its line."""
    found = collections.defaultdict(list)
    for path, text in sorted(files.items()):
        open_namespaces = []
        for number, line in enumerate(text.splitlines(), 1):
            if opened := NAMESPACE.match(line):
                open_namespaces.append(opened[1] or "(anonymous)")
            elif line.startswith("}  // namespace"):
                open_namespaces.pop()
            elif (defined := DEFINITION.match(line)) and "(anonymous)" not in open_namespaces:
                found["::".join([*open_namespaces, defined[1]])].append(f"{path}:{number}")
    return [f"{name} is defined at {' and at '.join(places)}" for name, places in found.items() if len(places) > 1]


def misplaced_headers(files):
    complaints = []
    for path, text in sorted(files.items()):
        for header in re.findall(r"^#include [<\"]([^>\"]+)[>\"]", text, re.MULTILINE):
            if header in PLACES and path not in PLACES[header]:
                complaints.append(f"{path} includes {header}, which is for {' and '.join(sorted(PLACES[header]))}")
    return complaints


def shared_folders(files):
    """Tests run side by side, each in a process of its own: a folder of a fixed name is two tests' at once."""
    return [f"{path} uses {word}, which other tests share; test::TemporaryDirectory is one test's"
            for path, text in sorted(files.items()) for word in ("testing::TempDir", '"/tmp') if word in text]
