// A unit test is one program: #include "check.h", then TEST(name) { CHECK(...); ... }.
// A failed check says where and what, and the test goes on. The program ends with one line
// "N passed, N failed"; arguments pick the tests whose name contains one of them.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstring>
#include <exception>
#include <functional>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

namespace check {

struct Case {
  const char* name;
  void (*run)();
};
inline std::vector<Case>& cases() {
  static std::vector<Case> list;
  return list;
}
struct Registrar {
  Registrar(const char* name, void (*run)()) { cases().push_back({name, run}); }
};
inline long num_checks = 0, num_failures = 0;

template <class T>
std::string show(const T& x) {
  std::ostringstream s;
  if constexpr (std::is_enum_v<T>) {
    s << static_cast<long long>(x);
  } else if constexpr (std::is_same_v<T, signed char> || std::is_same_v<T, unsigned char>) {
    s << int{x};
  } else if constexpr (requires { s << x; }) {
    s.precision(17);
    s << x;
  } else if constexpr (requires { x.begin(), x.end(); }) {
    s << "[";
    for (const auto& item : x) s << (s.str().size() > 1 ? ", " : "") << show(item);
    s << "]";
  } else {
    s << "(a value that cannot be printed)";
  }
  return s.str();
}

inline bool report(bool ok, const char* file, int line, const std::string& what) {
  ++num_checks;
  if (!ok) {
    ++num_failures;
    std::printf("%s:%d: %s\n", file, line, what.c_str());
  }
  return ok;
}

inline bool report(bool ok, const char* file, int line, const char* what) {
  if (ok) [[likely]] {  // makes no string: tests check every cell of many masks
    ++num_checks;
    return true;
  }
  return report(false, file, line, std::string(what));
}

/// The text of the exception that `call` throws; "" (with `threw` false) if it throws none.
template <class E>
std::string thrown(bool& threw, const std::function<void()>& call) {
  threw = false;
  try {
    call();
  } catch (const E& e) {
    threw = true;
    return e.what();
  } catch (const std::exception& e) {
    return std::string("another exception: ") + e.what();
  }
  return "nothing was thrown";
}

inline int run(int argc, char** argv) {
  int passed = 0, failed = 0;
  for (const Case& c : cases()) {
    bool wanted = argc < 2;
    for (int a = 1; a < argc; ++a) wanted |= std::strstr(c.name, argv[a]) != nullptr;
    if (!wanted) continue;
    long before = num_failures;
    try {
      c.run();
    } catch (const std::exception& e) {
      report(false, c.name, 0, std::string("threw ") + e.what());
    }
    bool ok = num_failures == before;
    ok ? ++passed : ++failed;
    if (!ok) std::printf("FAILED %s\n", c.name);
  }
  std::printf("%d passed, %d failed (%ld checks)\n", passed, failed, num_checks);
  // A program that checked nothing has not passed.
  return failed == 0 && num_checks > 0 ? 0 : 1;
}

}  // namespace check

#define TEST(name)                                                      \
  static void test_##name();                                            \
  static const ::check::Registrar registrar_##name(#name, test_##name); \
  static void test_##name()

/// Each check returns whether it held, so that a loop may stop at its first failure.
#define CHECK(...) \
  ::check::report(static_cast<bool>(__VA_ARGS__), __FILE__, __LINE__, "not true: " #__VA_ARGS__)

#define CHECK_EQ(a, b)                                                                \
  [&](const auto& x, const auto& y) {                                                 \
    bool same = x == y;                                                               \
    return ::check::report(same, __FILE__, __LINE__,                                  \
                           same ? std::string()                                       \
                                : std::string(#a " == " #b ": ") + ::check::show(x) + \
                                      " against " + ::check::show(y));                \
  }((a), (b))

/// |a - b| <= tolerance; NaN never passes, equal infinities do.
#define CHECK_NEAR(a, b, tolerance)                                                            \
  [&](double x, double y, double tol) {                                                        \
    bool near = x == y || std::abs(x - y) <= tol;                                              \
    return ::check::report(near, __FILE__, __LINE__,                                           \
                           near ? std::string()                                                \
                                : std::string(#a " near " #b ": ") + ::check::show(x) +        \
                                      " against " + ::check::show(y) + ", off by more than " + \
                                      ::check::show(tol));                                     \
  }((a), (b), (tolerance))

/// The statement throws `type` (or what derives from it) and its text contains `text`.
#define CHECK_THROWS(statement, type, text)                                                    \
  [&]() {                                                                                      \
    bool threw = false;                                                                        \
    std::string got = ::check::thrown<type>(threw, [&] { static_cast<void>(statement); });     \
    return ::check::report(                                                                    \
        threw && got.find(text) != std::string::npos, __FILE__, __LINE__,                      \
        std::string(#statement " should throw " #type " with '") + (text) + "'; got: " + got); \
  }()

int main(int argc, char** argv) { return ::check::run(argc, argv); }
