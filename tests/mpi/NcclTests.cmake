# NCCL over the emulated devices of tests/emulation, and the whole pipeline on them.
set(devices GRADCLIP_EMULATION_DEVICES=4)

# Every process has a device, and they are lazy ones, as real ones are.
function(nccl_test name)
  gradclip_mpi_test(${name} PROCESSES 1 2 3 4 ${ARGN})
  set_target_properties(${name} PROPERTIES GRADCLIP_EMULATED ON)
  foreach(processes IN ITEMS 1 2 3 4)
    set_tests_properties(${name}.np${processes} PROPERTIES ENVIRONMENT "${devices}")
  endforeach()
endfunction()
nccl_test(nccl_communicator_test
  SOURCES nccl_communicator_test.cpp
  LINKS gradclip::comm gradclip::cuda_runtime gradclip_emulated_cudart)
nccl_test(device_pipeline_test
  SOURCES pipeline_test.cpp
  LINKS gradclip::clip gradclip::comm gradclip_dump_builder)
target_compile_definitions(device_pipeline_test PRIVATE GRADCLIP_TEST_DEVICE=cuda)

add_executable(nccl_communicator_failure_test
  nccl_communicator_failure_test.cpp "${PROJECT_SOURCE_DIR}/tests/support/mpi_main.cpp")
target_link_libraries(nccl_communicator_failure_test PRIVATE
  gradclip::comm gradclip::cuda_runtime gradclip_emulated_cudart gradclip_options GTest::gmock GTest::gtest
  MPI::MPI_CXX)
target_include_directories(nccl_communicator_failure_test PRIVATE "${PROJECT_SOURCE_DIR}/tests/support")
set_target_properties(nccl_communicator_failure_test PROPERTIES GRADCLIP_EMULATED ON)

# nccl_end_of_run(<name> PROCESSES <number> TARGET <target> [FILTER <test>] [ENVIRONMENT <variables>] [CHECKS <-D...>])
#
# One run of a test and how it ended, which the run cannot see itself.
function(nccl_end_of_run name)
  cmake_parse_arguments(PARSE_ARGV 1 test "" "PROCESSES;TARGET;FILTER" "ENVIRONMENT;CHECKS")
  set(command "${PROJECT_SOURCE_DIR}/tests/support/mpirun.sh" "${MPIEXEC_EXECUTABLE}" --allow-run-as-root --oversubscribe
    -np ${test_PROCESSES} "$<TARGET_FILE:${test_TARGET}>")
  if(test_FILTER)
    list(APPEND command "--gtest_filter=${test_FILTER}")
  endif()
  add_test(NAME ${name}
    COMMAND "${CMAKE_COMMAND}" "-DCOMMAND=${command}" ${test_CHECKS} -P "${CMAKE_CURRENT_SOURCE_DIR}/end_of_run.cmake")
  set_tests_properties(${name} PROPERTIES
    LABELS mpi TIMEOUT 60 PROCESSORS 2 ENVIRONMENT "${devices};${test_ENVIRONMENT}")  # the last one of a name counts
endfunction()

# What the environment makes fail: the nth call of a function, in all processes or @one of them.
function(nccl_failure_test test fails)
  nccl_end_of_run(nccl_communicator_failure_test.${test} TARGET nccl_communicator_failure_test PROCESSES 3
    FILTER NcclFailure.${test}
    ENVIRONMENT "GRADCLIP_EMULATION_FAIL=${fails}" ${ARGN})
endfunction()
nccl_failure_test(HangEndsByTimeout ncclHang:1 GRADCLIP_NCCL_TIMEOUT=1 CHECKS -DCODE=0)
# Setting up takes a few of the 2000 questions, and each takes up to a millisecond.
nccl_failure_test(AsynchronousErrorEndsTheWait ncclHang:1,ncclAsync:2000 CHECKS -DCODE=0)
nccl_failure_test(SettingUpFails ncclAsync:1 CHECKS -DCODE=0)
nccl_failure_test(DeviceFails copy:2 CHECKS -DCODE=0)

# One process fails while the others wait for it in NCCL: one message and one code, within seconds.
foreach(call IN ITEMS ncclSend ncclGroupEnd ncclCommInitRankConfig)
  nccl_end_of_run(nccl_communicator_failure_test.OneProcessEndsAll.${call}
    TARGET nccl_communicator_failure_test PROCESSES 3 FILTER NcclFailure.OneProcessEndsAll
    ENVIRONMENT "GRADCLIP_EMULATION_FAIL=${call}:1@1"
    CHECKS -DCODE=5 -DMESSAGES=1 "-DMESSAGE=NCCL, ")
endforeach()

foreach(test IN ITEMS nccl_communicator_test device_pipeline_test)
  nccl_end_of_run(${test}.leaves_nothing TARGET ${test} PROCESSES 3
    CHECKS -DCODE=0 "-DLOG=${CMAKE_CURRENT_BINARY_DIR}/${test}.log")
endforeach()
# Two processes on one device: no NCCL, addends through host memory to the device.
nccl_end_of_run(device_pipeline_test.shared_device TARGET device_pipeline_test PROCESSES 2
  ENVIRONMENT GRADCLIP_EMULATION_DEVICES=1 CHECKS -DCODE=0)
