# Every library that is not ours, found in one place. Versions that Debian 12 ships are enough.
find_package(Threads REQUIRED)
find_package(fmt 9 REQUIRED)
find_package(nlohmann_json 3.11 REQUIRED)
find_package(CLI11 2.1 REQUIRED)

set(MPI_CXX_SKIP_MPICXX ON)  # the deprecated C++ bindings
find_package(MPI REQUIRED COMPONENTS CXX)

# FindHDF5 names libraries that the serial C flavour does not need; one imported target hides its variables. The serial
# flavour is meant: the headers of the MPI flavour include mpi.h.
set(HDF5_PREFER_PARALLEL FALSE)
find_package(HDF5 1.10 REQUIRED COMPONENTS C)
add_library(gradclip_hdf5 INTERFACE)
target_include_directories(gradclip_hdf5 SYSTEM INTERFACE ${HDF5_C_INCLUDE_DIRS})
target_link_libraries(gradclip_hdf5 INTERFACE ${HDF5_C_LIBRARIES})

find_package(ZLIB REQUIRED)  # HDF5's deflate filter, decoded outside its lock

find_path(XXHASH_INCLUDE_DIR xxhash.h REQUIRED)
add_library(gradclip_xxhash INTERFACE)
target_include_directories(gradclip_xxhash SYSTEM INTERFACE ${XXHASH_INCLUDE_DIR})
target_compile_definitions(gradclip_xxhash INTERFACE XXH_INLINE_ALL)

find_path(RE2_INCLUDE_DIR re2/re2.h REQUIRED)
find_library(RE2_LIBRARY re2 REQUIRED)
add_library(gradclip_re2 INTERFACE)
target_include_directories(gradclip_re2 SYSTEM INTERFACE ${RE2_INCLUDE_DIR})
target_link_libraries(gradclip_re2 INTERFACE ${RE2_LIBRARY})
