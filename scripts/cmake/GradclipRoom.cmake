# What every target of the project is compiled with.
add_library(gradclip_options INTERFACE)
target_compile_features(gradclip_options INTERFACE cxx_std_20)
target_compile_options(gradclip_options INTERFACE
  -ffp-contract=off                                  # docs/arithmetic.md: no fma in sums, on any compiler
  -fmacro-prefix-map=${PROJECT_SOURCE_DIR}/=         # error locations without one machine's paths
  -Wall -Wextra -Wpedantic -Wshadow -Wnon-virtual-dtor -Woverloaded-virtual -Wcast-align -Wimplicit-fallthrough
  $<$<CXX_COMPILER_ID:GNU>:-Wno-restrict>            # false alarms of GCC 12 on "text" + std::string (its bug 105651)
  $<$<BOOL:${GRADCLIP_WARNINGS_AS_ERRORS}>:-Werror>)

# What hardly computes is not optimised under the address sanitizer, where that is four fifths of compiling it.
function(gradclip_cold target)
  if(CMAKE_CXX_FLAGS MATCHES "-fsanitize=[a-z,]*address")
    target_compile_options(${target} PRIVATE -O0)
  endif()
endfunction()

# Most of a compilation is the reading of headers. With GRADCLIP_PRECOMPILE the rooms take those of the standard library and
# fmt ready-made, which halves it; without, which is the default, a file that lacks an #include does not compile.
if(GRADCLIP_PRECOMPILE)
  add_library(gradclip_precompiled OBJECT "${CMAKE_CURRENT_LIST_DIR}/precompiled.cpp")
  target_precompile_headers(gradclip_precompiled PRIVATE
    <fmt/format.h> <algorithm> <array> <cmath> <cstdint> <cstring> <filesystem> <functional> <limits> <map> <memory> <mutex>
    <optional> <set> <span> <string> <string_view> <system_error> <thread> <unordered_map> <utility> <vector>)
  target_link_libraries(gradclip_precompiled PRIVATE gradclip_options fmt::fmt Threads::Threads)
  gradclip_cold(gradclip_precompiled)
endif()

# gradclip_room(<name> SOURCES <files> [DEPENDS <rooms>] [LINKS <targets>] [PUBLIC_LINKS <targets>] [HOT])
#
# One room under src/: the library gradclip::<name>. Its headers are included as "gradclip/<name>/<file>.hpp" through an
# include root of its own, so that a header of a room that is not among its DEPENDS cannot be found. LINKS are foreign
# libraries and stay private: a foreign header is for one room's .cpp files. HOT: its loops go over every element.
function(gradclip_room name)
  cmake_parse_arguments(PARSE_ARGV 1 room "HOT" "" "SOURCES;DEPENDS;LINKS;PUBLIC_LINKS")
  set(include_root "${PROJECT_BINARY_DIR}/rooms/${name}")
  file(MAKE_DIRECTORY "${include_root}/gradclip")
  file(CREATE_LINK "${PROJECT_SOURCE_DIR}/src/${name}" "${include_root}/gradclip/${name}" SYMBOLIC)

  set(target gradclip_${name})
  add_library(${target} STATIC ${room_SOURCES})
  add_library(gradclip::${name} ALIAS ${target})
  if(room_HOT)
    target_compile_options(${target} PRIVATE $<$<CONFIG:Release>:-O3>)
  else()
    gradclip_cold(${target})
    if(GRADCLIP_PRECOMPILE AND "fmt::fmt" IN_LIST room_LINKS)
      target_precompile_headers(${target} REUSE_FROM gradclip_precompiled)
    endif()
  endif()
  target_include_directories(${target} PUBLIC "${include_root}")
  list(TRANSFORM room_DEPENDS PREPEND gradclip::)
  target_link_libraries(${target} PUBLIC ${room_DEPENDS} ${room_PUBLIC_LINKS} PRIVATE gradclip_options ${room_LINKS})

  # Each public header compiles alone.
  file(GLOB_RECURSE headers CONFIGURE_DEPENDS RELATIVE "${PROJECT_SOURCE_DIR}/src" "${PROJECT_SOURCE_DIR}/src/${name}/*.hpp")
  if(NOT TARGET gradclip_cuda_headers)
    list(FILTER headers EXCLUDE REGEX "cuda/kernels|nccl_")
  endif()
  list(FILTER headers EXCLUDE REGEX "cuda_runtime/launch|cuda/(lanes|magnitudes|vectors)")  # for kernels, which nvcc or the emulation compiles
  set(alone "")
  foreach(header IN LISTS headers)
    # ... unless it is the first #include of its own source, which tells as much.
    string(REGEX REPLACE "hpp$" "cpp" implementation "${header}")
    if(EXISTS "${PROJECT_SOURCE_DIR}/src/${implementation}" AND NOT GRADCLIP_PRECOMPILE)
      file(STRINGS "${PROJECT_SOURCE_DIR}/src/${implementation}" first REGEX "^#include" LIMIT_COUNT 1)
      if(first STREQUAL "#include \"gradclip/${header}\"")
        continue()
      endif()
    endif()
    string(MAKE_C_IDENTIFIER "${header}" identifier)
    set(source "${PROJECT_BINARY_DIR}/headers/${identifier}.cpp")
    file(CONFIGURE OUTPUT "${source}" CONTENT "#include \"gradclip/${header}\"  // IWYU pragma: keep\n")
    list(APPEND alone "${source}")
  endforeach()
  if(alone AND GRADCLIP_BUILD_TESTS AND GRADCLIP_CHECK_HEADERS)
    add_library(${target}_headers OBJECT ${alone})
    target_link_libraries(${target}_headers PRIVATE ${target} gradclip_options ${room_LINKS})
    target_compile_options(${target}_headers PRIVATE -O0)
  endif()
endfunction()
