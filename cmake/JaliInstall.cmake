# Two installs. Component cpp: the library, its header and find_package(jali). Component python: the
# operators, into the package (scikit-build-core gives the prefix).
if(TARGET jali_torch)
  install(TARGETS jali_torch LIBRARY DESTINATION jali COMPONENT python)
endif()
if(TARGET jali)
  include(CMakePackageConfigHelpers)
  set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/jali)
  install(TARGETS jali EXPORT jali-targets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT cpp
                                                   NAMELINK_COMPONENT cpp)
  install(DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR}/include/jali
          DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT cpp)
  install(EXPORT jali-targets FILE jali-config.cmake NAMESPACE jali:: DESTINATION ${package_dir}
          COMPONENT cpp)
  write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/jali-config-version.cmake
                                   COMPATIBILITY SameMinorVersion)
  install(FILES ${CMAKE_CURRENT_BINARY_DIR}/jali-config-version.cmake DESTINATION ${package_dir}
          COMPONENT cpp)
endif()
