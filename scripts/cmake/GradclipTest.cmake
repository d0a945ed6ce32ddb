# Most tests hardly compute, and compiling them would take most of a build: without optimisation, whatever the rest has.
# HOT: those that go over every element or pattern.
function(gradclip_compile_quickly name hot)
  if(hot)
    return()
  endif()
  target_compile_options(${name} PRIVATE -O0)
  # One precompiled header for all of them: reading GoogleTest's is what is left of the time.
  if(NOT TARGET gradclip_precompiled_tests)
    add_library(gradclip_precompiled_tests OBJECT "${PROJECT_SOURCE_DIR}/scripts/cmake/precompiled.cpp")
    target_precompile_headers(gradclip_precompiled_tests PRIVATE
      <gmock/gmock.h> <gtest/gtest.h> <algorithm> <cmath> <filesystem> <fstream> <functional> <map> <random> <set> <span>
      <string> <thread> <vector>)
    target_link_libraries(gradclip_precompiled_tests PRIVATE gradclip_options GTest::gmock Threads::Threads)
    target_compile_options(gradclip_precompiled_tests PRIVATE -O0)
  endif()
  target_precompile_headers(${name} REUSE_FROM gradclip_precompiled_tests)
endfunction()

# gradclip_unit_test(<name> SOURCES <files> LINKS <targets> [HOT])
#
# A GoogleTest binary; each of its tests is a test of ctest.
function(gradclip_unit_test name)
  cmake_parse_arguments(PARSE_ARGV 1 test "HOT" "" "SOURCES;LINKS")
  add_executable(${name} ${test_SOURCES})
  target_link_libraries(${name} PRIVATE ${test_LINKS} gradclip_options GTest::gmock GTest::gtest_main)
  target_include_directories(${name} PRIVATE "${PROJECT_SOURCE_DIR}/tests/support")
  gradclip_compile_quickly(${name} "${test_HOT}")
  gtest_discover_tests(${name} TEST_PREFIX "${name}." PROPERTIES LABELS unit TIMEOUT 120)
endfunction()

# gradclip_mpi_test(<name> PROCESSES <counts> SOURCES <files> LINKS <targets> [HOT])
#
# A GoogleTest binary with tests/support/mpi_main.cpp, run once for each process count. Too few cores mean
# oversubscription, never a dropped test.
function(gradclip_mpi_test name)
  cmake_parse_arguments(PARSE_ARGV 1 test "HOT" "" "PROCESSES;SOURCES;LINKS")
  add_executable(${name} ${test_SOURCES} "${PROJECT_SOURCE_DIR}/tests/support/mpi_main.cpp")
  target_link_libraries(${name} PRIVATE ${test_LINKS} gradclip_options GTest::gmock GTest::gtest MPI::MPI_CXX)
  target_include_directories(${name} PRIVATE "${PROJECT_SOURCE_DIR}/tests/support")
  gradclip_compile_quickly(${name} "${test_HOT}")
  foreach(processes IN LISTS test_PROCESSES)
    add_test(NAME ${name}.np${processes}
      COMMAND "${PROJECT_SOURCE_DIR}/tests/support/mpirun.sh" "${MPIEXEC_EXECUTABLE}" --allow-run-as-root --oversubscribe
              -np ${processes} $<TARGET_FILE:${name}>)
    set_tests_properties(${name}.np${processes} PROPERTIES LABELS mpi TIMEOUT 120 PROCESSORS 2)
  endforeach()
endfunction()
