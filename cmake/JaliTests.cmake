# Every tests/<path>/<name>_test.cpp is one program, tests/<path>/<name>_test in the build folder.
file(GLOB_RECURSE test_sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/tests/*_test.cpp)
foreach(source IN LISTS test_sources)
  file(RELATIVE_PATH path ${CMAKE_CURRENT_SOURCE_DIR}/tests ${source})
  string(REGEX REPLACE "\\.cpp$" "" name ${path})
  string(REPLACE "/" "_" target test_${name})
  get_filename_component(folder ${name} DIRECTORY)
  get_filename_component(stem ${name} NAME)
  add_executable(${target} ${source})
  target_include_directories(${target} PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/tests)
  target_link_libraries(${target} PRIVATE jali_core)
  set_target_properties(
    ${target} PROPERTIES OUTPUT_NAME ${stem}
                         RUNTIME_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/tests/${folder})
  add_test(NAME ${name} COMMAND ${target})
endforeach()
