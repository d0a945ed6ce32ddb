# CUDA and NCCL: which of them this build has, and the three ways in which an executable gets them.
#
#   GRADCLIP_CUDA            AUTO (where nvcc is found), ON (an error where it is not), OFF
#   CMAKE_CUDA_ARCHITECTURES 80, 90, 100 and 120 as machine code, the last as PTX too; or the environment's CUDAARCHS
#
# A room's code is compiled once, against NVIDIA's headers, and links no runtime. An executable gets
#   absent    answers "this build has no CUDA"
#   real      kernels by nvcc, cudart_static, libnccl
#   emulated  the same kernels by the host compiler, tests/emulation: where its property GRADCLIP_EMULATED is on
# through the target gradclip_device, which the rooms backend and comm name.
set(GRADCLIP_CUDA AUTO CACHE STRING "CUDA backend: AUTO, ON or OFF")
set_property(CACHE GRADCLIP_CUDA PROPERTY STRINGS AUTO ON OFF)
option(GRADCLIP_EMULATION "Build the tests that run the kernels without a GPU, where CUDA's headers are found" ON)

set(GRADCLIP_HAS_CUDA OFF)
if(NOT GRADCLIP_CUDA STREQUAL "OFF" OR GRADCLIP_EMULATION)
  # An installed toolkit, or the one that scripts/setup.sh --cuda fetches.
  find_program(GRADCLIP_NVCC nvcc HINTS ENV CUDACXX PATHS /usr/local/cuda/bin "${PROJECT_SOURCE_DIR}/build/cuda/bin")
  if(GRADCLIP_NVCC)
    get_filename_component(nvcc_bin "${GRADCLIP_NVCC}" REALPATH)
    get_filename_component(nvcc_bin "${nvcc_bin}" DIRECTORY)
    get_filename_component(nvcc_root "${nvcc_bin}" DIRECTORY)
    set(CUDAToolkit_ROOT "${nvcc_root}")
    find_package(CUDAToolkit 12.8 QUIET)
  endif()
endif()

if(CUDAToolkit_FOUND)
  find_path(NCCL_INCLUDE_DIR nccl.h HINTS ${CUDAToolkit_INCLUDE_DIRS} "${nvcc_root}/include")
  find_library(NCCL_LIBRARY NAMES nccl libnccl.so.2 HINTS ${CUDAToolkit_LIBRARY_DIR} "${nvcc_root}/lib" "${nvcc_root}/lib64")
  add_library(gradclip_cuda_headers INTERFACE)
  target_include_directories(gradclip_cuda_headers SYSTEM INTERFACE ${CUDAToolkit_INCLUDE_DIRS})
  if(NCCL_INCLUDE_DIR)
    target_include_directories(gradclip_cuda_headers SYSTEM INTERFACE ${NCCL_INCLUDE_DIR})
  endif()
endif()

if(NOT GRADCLIP_CUDA STREQUAL "OFF" AND CUDAToolkit_FOUND)
  if(NOT CMAKE_CUDA_COMPILER)
    set(CMAKE_CUDA_COMPILER "${GRADCLIP_NVCC}")
  endif()
  if(NOT CMAKE_CUDA_ARCHITECTURES)
    set(architectures 80-real 90-real 100-real 120)
    if(DEFINED ENV{CUDAARCHS})
      set(architectures $ENV{CUDAARCHS})
    endif()
    set(CMAKE_CUDA_ARCHITECTURES ${architectures} CACHE STRING "GPU architectures")
  endif()
  set(CMAKE_CUDA_HOST_COMPILER "${CMAKE_CXX_COMPILER}")
  enable_language(CUDA)
  set(GRADCLIP_HAS_CUDA ON)
endif()
set(GRADCLIP_HAS_NCCL OFF)
if(CUDAToolkit_FOUND AND NCCL_INCLUDE_DIR AND NCCL_LIBRARY)
  set(GRADCLIP_HAS_NCCL ON)
endif()

if(GRADCLIP_CUDA STREQUAL "ON" AND NOT GRADCLIP_HAS_CUDA)
  message(FATAL_ERROR "GRADCLIP_CUDA=ON and no CUDA toolkit (nvcc 12.8 or newer): scripts/setup.sh --cuda fetches one")
endif()
if(GRADCLIP_HAS_CUDA)
  list(JOIN CMAKE_CUDA_ARCHITECTURES ", " architectures)
  message(STATUS "gradclip: with CUDA ${CUDAToolkit_VERSION} for ${architectures}, NCCL ${GRADCLIP_HAS_NCCL}")
elseif(NOT GRADCLIP_CUDA STREQUAL "OFF")
  message(NOTICE "gradclip: *** THIS BUILD HAS NO CUDA: --device cuda will be refused *** (scripts/setup.sh --cuda)")
endif()
if(NOT (CUDAToolkit_FOUND AND NCCL_INCLUDE_DIR AND GRADCLIP_BUILD_TESTS))
  set(GRADCLIP_EMULATION OFF)
endif()

# libnccl of a toolkit that is no package of the system is found where it was linked from.
if(GRADCLIP_HAS_NCCL)
  set(CMAKE_INSTALL_RPATH_USE_LINK_PATH ON)
endif()

add_library(gradclip_device INTERFACE)
add_library(gradclip_device_real INTERFACE)
add_library(gradclip_device_emulated INTERFACE)
# Evaluated for the executable at the head of the link.
target_link_libraries(gradclip_device INTERFACE
  "$<IF:$<BOOL:$<TARGET_PROPERTY:GRADCLIP_EMULATED>>,gradclip_device_emulated,gradclip_device_real>")

# What every file of kernels is compiled with, by nvcc: no contraction (docs/arithmetic.md), no spills.
set(GRADCLIP_NVCC_OPTIONS
  -std=c++20 -fmad=false -Xptxas=-warn-spills,-warn-lmem-usage -Werror=all-warnings
  -Xcompiler=-ffp-contract=off,-Wall,-Wextra)
