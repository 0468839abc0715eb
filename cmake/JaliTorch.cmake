# libjali_torch.so: binding/torch over the libtorch stable ABI (target 2.11), so that one binary
# serves every Python and every torch >= 2.11, with or without CUDA.
# -I: inside pip's build isolation this still finds the environment's own torch.
find_package(Python REQUIRED COMPONENTS Interpreter)
if(NOT TORCH_ROOT)
  execute_process(
    COMMAND
      ${Python_EXECUTABLE} -I -c
      "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
    OUTPUT_VARIABLE TORCH_ROOT OUTPUT_STRIP_TRAILING_WHITESPACE)
endif()
if(NOT EXISTS "${TORCH_ROOT}/include/torch/csrc/stable/library.h")
  message(
    FATAL_ERROR
      "Jali's PyTorch operators are built against an installed torch >= 2.11, and "
      "${Python_EXECUTABLE} has none. Install it first, then repeat: "
      "pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu "
      "(CPU only; leave the index out for CUDA), or pass -DTORCH_ROOT=<folder of the torch package>.")
endif()

file(GLOB binding_sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/binding/torch/*.cpp)
if(NOT binding_sources)
  message(STATUS "binding/torch has no sources: libjali_torch is not built")
  return()
endif()
add_library(jali_torch SHARED ${binding_sources})
target_include_directories(jali_torch PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/include)
target_include_directories(jali_torch SYSTEM PRIVATE ${TORCH_ROOT}/include)
target_compile_definitions(jali_torch PRIVATE TORCH_TARGET_VERSION=0x020b000000000000)
# The core's own symbols stay inside: a process may also hold a libjali.so of another version.
target_link_libraries(jali_torch PRIVATE jali_core ${TORCH_ROOT}/lib/libtorch_cpu.so)
target_link_options(jali_torch PRIVATE -Wl,--exclude-libs,ALL)
set_target_properties(jali_torch PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}
                                            SKIP_BUILD_RPATH ON)
