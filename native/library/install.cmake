# What another build finds: libroofline.so under its versioned names, libroofline.a, the header, find_package, pkg-config.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

install(TARGETS roofline_shared roofline_static EXPORT roofline_targets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
  INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(FILES include/roofline.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})

set(PACKAGE ${CMAKE_INSTALL_LIBDIR}/cmake/roofline)
install(EXPORT roofline_targets NAMESPACE roofline:: FILE roofline-targets.cmake DESTINATION ${PACKAGE})
configure_package_config_file(native/library/roofline-config.cmake.in roofline-config.cmake INSTALL_DESTINATION ${PACKAGE})
write_basic_package_version_file(roofline-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/roofline-config.cmake
  ${CMAKE_CURRENT_BINARY_DIR}/roofline-config-version.cmake DESTINATION ${PACKAGE})

# Paths that begin at the file itself: what was installed may be moved.
file(RELATIVE_PATH PREFIX ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
string(REGEX REPLACE "/$" "" PREFIX "${PREFIX}")
configure_file(native/library/roofline.pc.in roofline.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/roofline.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
