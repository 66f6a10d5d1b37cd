// What the patches' sources use of the header by this name, for libmbolt-preload.
#pragma once

#include <cstdarg>
#include <cstdio>
#include <string>

#define LLAMA_LOG_WARN(...) fprintf(stderr, __VA_ARGS__)

__attribute__((format(printf, 1, 2))) inline std::string format(const char * fmt, ...) {
    va_list args, again;
    va_start(args, fmt);
    va_copy(again, args);
    const int size = vsnprintf(nullptr, 0, fmt, args);
    std::string res(size > 0 ? size : 0, '\0');
    vsnprintf(&res[0], res.size() + 1, fmt, again);
    va_end(again);
    va_end(args);
    return res;
}
