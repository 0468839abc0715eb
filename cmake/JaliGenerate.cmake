# What the build writes from the tree:
#   leaf_list.h        every src/mask/leaf/*.h included, and JALI_FOR_EACH_LEAF(X) over them
#   backend_list.h     every src/<name>/backend.h included, and JALI_FOR_EACH_BACKEND(X)
#   variant_list.h     JALI_FOR_EACH_fwd_VARIANT(X), …_bwd_… over the kernel variants
#   source_pack.{h,cpp}  the texts that kernels compiled at run time may include
set(JALI_GENERATED_DIR ${CMAKE_CURRENT_BINARY_DIR}/generated)

file(GLOB leaf_headers CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/src/mask/leaf/*.h)
list(SORT leaf_headers)
set(includes "")
set(entries "")
foreach(header IN LISTS leaf_headers)
  get_filename_component(stem ${header} NAME_WE)
  string(REPLACE "_" ";" words ${stem})
  set(camel "")
  foreach(word IN LISTS words)
    string(SUBSTRING ${word} 0 1 head)
    string(SUBSTRING ${word} 1 -1 tail)
    string(TOUPPER ${head} head)
    string(APPEND camel ${head}${tail})
  endforeach()
  string(APPEND includes "#include \"mask/leaf/${stem}.h\"\n")
  string(APPEND entries " \\\n  X(${camel}, ${stem})")
endforeach()
file(CONFIGURE OUTPUT generated/leaf_list.h @ONLY NEWLINE_STYLE UNIX CONTENT
"// Written by the build from src/mask/leaf/*.h: X(struct in jali::leaf, name), sorted by name.
#pragma once

@includes@
#define JALI_FOR_EACH_LEAF(X)@entries@
")

file(GLOB backend_headers CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/src/*/backend.h)
list(REMOVE_ITEM backend_headers ${CMAKE_CURRENT_SOURCE_DIR}/src/backend/backend.h)
list(SORT backend_headers)
set(includes "")
set(entries "")
foreach(header IN LISTS backend_headers)
  get_filename_component(folder ${header} DIRECTORY)
  get_filename_component(name ${folder} NAME)
  string(APPEND includes "#include \"${name}/backend.h\"\n")
  string(APPEND entries " \\\n  X(${name})")
endforeach()
file(CONFIGURE OUTPUT generated/backend_list.h @ONLY NEWLINE_STYLE UNIX CONTENT
"// Written by the build from src/*/backend.h: X(name) for every backend `name`_backend().
#pragma once

@includes@
#define JALI_FOR_EACH_BACKEND(X)@entries@
")

# Kernel variants: src/cuda/variant/fwd_*.cpp and bwd_*.cpp, each with the function of its name.
set(variants "")
foreach(kind fwd bwd)
  file(GLOB found CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/src/cuda/variant/${kind}_*.cpp)
  list(SORT found)
  string(APPEND variants "#define JALI_FOR_EACH_${kind}_VARIANT(X)")
  foreach(source IN LISTS found)
    get_filename_component(stem ${source} NAME_WE)
    string(APPEND variants " X(${stem})")
  endforeach()
  string(APPEND variants "\n")
endforeach()
file(CONFIGURE OUTPUT generated/variant_list.h @ONLY NEWLINE_STYLE UNIX CONTENT
"// Written by the build from src/cuda/variant/*.cpp.
#pragma once

@variants@")

# The pack starts from the leaves, what predicates are made of and the kernels, and follows their
# includes.
file(GLOB kernel_texts CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/src/cuda/variant/*.cuh
     ${CMAKE_CURRENT_SOURCE_DIR}/src/cuda/kernel/*.h ${CMAKE_CURRENT_SOURCE_DIR}/src/cuda/tile/*.h)
set(pack_roots ${leaf_headers} ${CMAKE_CURRENT_SOURCE_DIR}/src/mask/predicate/generated.h
    ${kernel_texts})
file(GLOB_RECURSE pack_candidates CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/src/base/*.h
     ${CMAKE_CURRENT_SOURCE_DIR}/src/mask/*.h ${CMAKE_CURRENT_SOURCE_DIR}/src/cuda/*.h)
add_custom_command(
  OUTPUT ${JALI_GENERATED_DIR}/source_pack.cpp ${JALI_GENERATED_DIR}/source_pack.h
  COMMAND ${CMAKE_COMMAND} "-DROOTS=${pack_roots}" -DSOURCE_DIR=${CMAKE_CURRENT_SOURCE_DIR}/src
          -DOUT=${JALI_GENERATED_DIR}/source_pack -P ${CMAKE_CURRENT_LIST_DIR}/source_pack.cmake
  DEPENDS ${pack_roots} ${pack_candidates} ${CMAKE_CURRENT_LIST_DIR}/source_pack.cmake
  COMMENT "Embedding device sources"
  VERBATIM)
set(JALI_GENERATED_SOURCES ${JALI_GENERATED_DIR}/source_pack.cpp ${JALI_GENERATED_DIR}/source_pack.h)
