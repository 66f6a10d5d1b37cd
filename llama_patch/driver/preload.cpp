// libmbolt-preload.so: trace and prefetch of the patches over an unmodified libllama. LD_PRELOAD puts
// it before libggml-base, where it takes the place of three functions that libllama calls. It touches
// nothing of libllama, and of ggml it needs the public interface and the layout of ggml_tensor.
#include "llama-expert-hook.h"
#include "llama-expert-prefetch.h"
#include "llama-model.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

// llama_expert_prefetch_init() of the patch is compiled under this name
std::unique_ptr<llama_expert_observer> mbolt_prefetch_init(const llama_model & model);

namespace {

// what is known of a context of libllama: each has a scheduler of its own
struct context {
    ggml_backend_sched_eval_callback user_cb = nullptr;
    void * user_cb_data = nullptr;

    llama_model model;
    std::unique_ptr<llama_expert_hook> hook; // once a graph with experts was seen
};

struct registry {
    std::mutex mutex;
    std::map<ggml_backend_sched_t, context> by_sched;

    context & of(ggml_backend_sched_t sched) {
        std::lock_guard<std::mutex> lock(mutex);
        return by_sched[sched];
    }
    void forget(ggml_backend_sched_t sched) {
        std::lock_guard<std::mutex> lock(mutex);
        by_sched.erase(sched);
    }
};

registry & contexts = *new registry; // never destroyed: some contexts are freed after main()

template <typename F>
F * next(const char * name) {
    void * found = dlsym(RTLD_NEXT, name);
    if (found == nullptr) {
        fprintf(stderr, "mbolt-preload: %s is in no library that the program was linked to\n", name);
        abort();
    }
    return (F *) found;
}

bool is_wanted() {
    for (const char * name : { "MBOLT_TRACE", "MBOLT_PREFETCH" }) {
        const char * value = getenv(name);
        if (value && *value) {
            return true;
        }
    }
    return false;
}

// whether this tensor is laid out as it was when this library was compiled, as far as ggml tells
bool is_known(const ggml_tensor * t) {
    const size_t object_size = 32; // what ggml_tensor_overhead() adds
    return ggml_tensor_overhead() == object_size + sizeof(ggml_tensor) && ggml_get_name(t) == t->name &&
        ggml_get_data(t) == t->data && ggml_nelements(t) == t->ne[0]*t->ne[1]*t->ne[2]*t->ne[3];
}

// finds the experts in a graph whose nodes still use the weights themselves, not copies on a GPU
// false if this ggml is not known
bool look(ggml_cgraph * graph, llama_model & model) {
    const std::string suffix = "_exps.weight";
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        ggml_tensor * node = ggml_graph_node(graph, i);
        if (!is_known(node)) {
            return false;
        }
        ggml_tensor * t = strcmp(ggml_op_desc(node), "MUL_MAT_ID") == 0 ? node->src[0] : nullptr;
        const std::string name = t ? t->name : "";
        if (name.size() > suffix.size() && name.compare(name.size() - suffix.size(), suffix.size(), suffix) == 0) {
            model.tensors_by_name.emplace_back(name, t);
            model.hparams.n_expert = std::max(model.hparams.n_expert, (uint32_t) t->ne[2]);
        }
    }
    return true;
}

// faults bring in no more than the page that is missing; the loader of the patches does this
void stop_readahead(const ggml_tensor * t) {
    if (t->buffer == nullptr || strstr(ggml_backend_buffer_name(t->buffer), "_Mapped") == nullptr) {
        return;
    }
    const uintptr_t page  = (uintptr_t) sysconf(_SC_PAGESIZE);
    const uintptr_t begin = ((uintptr_t) t->data + page - 1)/page*page;
    const uintptr_t end   = ((uintptr_t) t->data + ggml_nbytes(t))/page*page;
    if (begin < end) {
        madvise((void *) begin, end - begin, MADV_RANDOM);
    }
}

} // namespace

std::unique_ptr<llama_expert_observer> llama_expert_prefetch_init(const llama_model & model) {
    auto res = mbolt_prefetch_init(model);
    const char * advice = getenv("MBOLT_PREFETCH_ADVICE");
    if (res && (advice == nullptr || *advice == '\0' || strcmp(advice, "random") == 0)) {
        for (const auto & it : model.tensors_by_name) {
            stop_readahead(it.second);
        }
    }
    return res;
}

void ggml_backend_sched_set_eval_callback(ggml_backend_sched_t sched, ggml_backend_sched_eval_callback cb, void * data) {
    static const auto set = next<decltype(ggml_backend_sched_set_eval_callback)>(__func__);
    context & ctx = contexts.of(sched);
    if (ctx.hook == nullptr || data != ctx.hook.get()) { // else it is the hook that calls
        ctx.user_cb      = cb;
        ctx.user_cb_data = data;
    }
    set(sched, cb, data);
}

// Called with each new graph before it is divided among backends.
bool ggml_backend_sched_alloc_graph(ggml_backend_sched_t sched, ggml_cgraph * graph) {
    static const auto alloc = next<decltype(ggml_backend_sched_alloc_graph)>(__func__);
    static std::atomic<bool> is_on { is_wanted() };
    if (is_on) {
        context & ctx = contexts.of(sched);
        if (ctx.hook == nullptr && !look(graph, ctx.model)) {
            fprintf(stderr, "mbolt-preload is off: the program's ggml is not of the version that this was built for\n");
            is_on = false;
        } else if (ctx.hook == nullptr && ctx.model.hparams.n_expert > 0) {
            ctx.hook = std::make_unique<llama_expert_hook>(ctx.model);
        }
        if (ctx.hook) {
            ctx.hook->install(sched, ctx.user_cb, ctx.user_cb_data);
        }
    }
    return alloc(sched, graph);
}

void ggml_backend_sched_free(ggml_backend_sched_t sched) {
    static const auto free = next<decltype(ggml_backend_sched_free)>(__func__);
    contexts.forget(sched);
    free(sched);
}
