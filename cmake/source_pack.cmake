# cmake -DROOTS=a.h;b.h -DSOURCE_DIR=src -DOUT=stem -P source_pack.cmake
# Writes OUT.h and OUT.cpp: ROOTS and all that they include with quotes, as raw string literals
# under the names by which they are included.
cmake_minimum_required(VERSION 3.20)
set(queue ${ROOTS})
set(seen "")
set(entries "")
while(queue)
  list(POP_FRONT queue path)
  file(RELATIVE_PATH name ${SOURCE_DIR} ${path})
  if(name IN_LIST seen)
    continue()
  endif()
  list(APPEND seen ${name})
  file(READ ${path} text)
  string(APPEND entries "    {\"${name}\", R\"jali(${text})jali\"},\n")
  string(REGEX MATCHALL "\n#include \"[^\"]+\"" includes "\n${text}")
  foreach(line IN LISTS includes)
    string(REGEX REPLACE ".*\"([^\"]+)\"" "\\1" included "${line}")
    list(APPEND queue ${SOURCE_DIR}/${included})
  endforeach()
endwhile()
file(WRITE ${OUT}.h "// Written by the build: the sources that kernels compiled at run time may include.
#pragma once

namespace jali {

struct PackedSource {
  const char* name;  // as in #include \"name\"
  const char* text;
};
/// Ends with an entry of null pointers.
extern const PackedSource kSourcePack[];

}  // namespace jali
")
file(WRITE ${OUT}.cpp "#include \"source_pack.h\"

namespace jali {

const PackedSource kSourcePack[] = {
${entries}    {nullptr, nullptr},
};

}  // namespace jali
")
