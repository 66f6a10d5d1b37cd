# Half of the time that llama.cpp takes to compile goes into headers that each of its files reads
# again, and much of the rest into optimizing code that waits for a person, a file or a socket. So:
# several files a compiler run, and -O1 for what is around the library. ggml, where the arithmetic
# is, and the optimization of llama stay as they are.
option(MBOLT_QUICK "join source files; -O1 for chat templates, options, server and images" ON)
if (NOT MBOLT_QUICK OR MSVC)
    return()
endif()

# Joins BATCH files of TARGET at a time, but for those named after them.
function(mbolt_join target batch)
    # Properties of files in another folder came with 3.18.
    if (CMAKE_VERSION VERSION_LESS 3.18 OR NOT TARGET ${target})
        return()
    endif()
    get_target_property(folder ${target} SOURCE_DIR)
    get_target_property(sources ${target} SOURCES)
    foreach (source IN LISTS sources)
        get_filename_component(path "${source}" ABSOLUTE BASE_DIR "${folder}")
        get_filename_component(name "${source}" NAME)
        set(alone OFF)
        if (name IN_LIST ARGN)
            set(alone ON)
        endif()
        set_source_files_properties("${path}" TARGET_DIRECTORY ${target}
            PROPERTIES SKIP_UNITY_BUILD_INCLUSION ${alone})
    endforeach()
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE ${batch})
endfunction()

# It has functions of llama-graph.cpp and models/deepseek4.cpp by the same names.
mbolt_join(llama 8 llama-kv-cache-dsv4.cpp)
# It chooses how the header of nlohmann checks, before it reads it.
mbolt_join(llama-common 8 json.cpp)
mbolt_join(server-context 5)
mbolt_join(llama-server-impl 3)
mbolt_join(llama-cli-impl 3)
# Outside of the library on purpose: they refuse its internal headers.
mbolt_join(mtmd 16 mtmd-helper.cpp mtmd-helper-gen.cpp)

foreach (target llama-common server-context llama-server-impl llama-cli-impl mtmd cpp-httplib)
    if (TARGET ${target})
        target_compile_options(${target} PRIVATE $<$<CONFIG:Release>:-O1>)
    endif()
endforeach()
