// Throwing jali::Error with a sentence made of parts.
#pragma once

#include <jali/jali.h>

#include <sstream>

namespace jali {

template <class... Parts>
[[noreturn]] void fail(Error::Kind kind, const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw Error(kind, text.str());
}
/// A wrong value: shape, number, content of a table.
template <class... Parts>
[[noreturn]] void value_error(const Parts&... parts) {
  fail(Error::Kind::kValue, parts...);
}
/// A wrong dtype or device.
template <class... Parts>
[[noreturn]] void type_error(const Parts&... parts) {
  fail(Error::Kind::kType, parts...);
}
/// A thing that Jali does not do.
template <class... Parts>
[[noreturn]] void unsupported(const Parts&... parts) {
  fail(Error::Kind::kUnsupported, parts...);
}

}  // namespace jali
