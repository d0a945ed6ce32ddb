gradclip_unit_test(base_test
  SOURCES
    ${CMAKE_CURRENT_LIST_DIR}/dtype_test.cpp
    ${CMAKE_CURRENT_LIST_DIR}/error_test.cpp
    ${CMAKE_CURRENT_LIST_DIR}/precision_test.cpp
    ${CMAKE_CURRENT_LIST_DIR}/worker_pool_test.cpp
  LINKS gradclip::base)
