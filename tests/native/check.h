// The whole test framework: CHECK prints where it failed and ends the process, test() names what runs.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>

#include "status.h"

namespace ldr_test {

inline std::string text_of(const std::string &v) { return v; }
inline std::string text_of(const char *v) { return v ? v : "(null)"; }
inline std::string text_of(const void *v) { return v ? "pointer" : "nullptr"; }
inline std::string text_of(bool v) { return v ? "true" : "false"; }
template <class T> std::string text_of(const T &v) {
  if constexpr (std::is_enum_v<T>) return std::to_string(static_cast<std::underlying_type_t<T>>(v));
  else return std::to_string(v);
}

[[noreturn]] inline void failed(const char *file, int line, const std::string &what) {
  fprintf(stderr, "%s:%d: CHECK failed: %s\n", file, line, what.c_str());
  fflush(nullptr);
  _Exit(1);
}

// Runs a case and says its name first, so that a hang or a crash has a place.
template <class F> void test(const char *name, F body) {
  fprintf(stderr, "  %s\n", name);
  body();
}

}  // namespace ldr_test

#define CHECK(condition)                                                  \
  do {                                                                    \
    if (!(condition)) ldr_test::failed(__FILE__, __LINE__, #condition);   \
  } while (0)

// Values of the same type that print: numbers, strings, bools, enums.
#define CHECK_EQ(actual, expected)                                                                                        \
  do {                                                                                                                    \
    auto actual_value = (actual);                                                                                         \
    decltype(actual_value) expected_value = (expected);                                                                   \
    if (!(actual_value == expected_value))                                                                                \
      ldr_test::failed(__FILE__, __LINE__, std::string(#actual " == " #expected ", got ") + ldr_test::text_of(actual_value) + \
                                               ", expected " + ldr_test::text_of(expected_value));                        \
  } while (0)

// Of an ldr::Status.
#define CHECK_OK(expression)                                                                                              \
  do {                                                                                                                    \
    ldr::Status status_value = (expression);                                                                              \
    if (!status_value.ok())                                                                                               \
      ldr_test::failed(__FILE__, __LINE__, std::string(#expression ": ") + ldr_status_name(status_value.code) + ": " +    \
                                               status_value.text);                                                        \
  } while (0)

#define CHECK_CODE(expression, expected_code)                                                                             \
  do {                                                                                                                    \
    ldr::Status status_value = (expression);                                                                              \
    if (status_value.code != (expected_code))                                                                             \
      ldr_test::failed(__FILE__, __LINE__, std::string(#expression " gives " #expected_code ", got ") +                   \
                                               ldr_status_name(status_value.code) + ": " + status_value.text);            \
  } while (0)

// Of a C function: any other code than the expected one is printed with ldr_last_error().
#define CHECK_C(expression, expected_code)                                                                                \
  do {                                                                                                                    \
    ldr_status_t code_value = (expression);                                                                               \
    if (code_value != (expected_code))                                                                                    \
      ldr_test::failed(__FILE__, __LINE__, std::string(#expression " gives " #expected_code ", got ") +                   \
                                               ldr_status_name(code_value) + ": " + ldr_last_error());                    \
  } while (0)

#define CHECK_CONTAINS(text, part)                                                                                        \
  do {                                                                                                                    \
    std::string text_value = (text);                                                                                      \
    if (text_value.find(part) == std::string::npos)                                                                       \
      ldr_test::failed(__FILE__, __LINE__, std::string(#text " contains " #part ", got: ") + text_value);                 \
  } while (0)
