// mbolt-driver: evaluates tokens with llama.cpp's library and says what that cost, as one line of JSON.
// Built against the patched tree, or (as mbolt-driver-stock) against the tree as it is.
#include "llama.h"

#ifdef MBOLT_PATCHED
#include "llama-expert-prefetch.h"
#endif

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include <sys/resource.h>

namespace {

const char * const usage =
    "usage: mbolt-driver -m MODEL (--tokens FILE | --prompt TEXT) [options]\n"
    "  --tokens FILE    token ids, 32 bits each, little-endian\n"
    "  --prompt TEXT    text to tokenize\n"
    "  --decode N       evaluate the last N of these tokens one at a time\n"
    "  --forced FILE    tokens to evaluate one at a time after them\n"
    "  -n N             then choose N tokens greedily\n"
    "  --warmup N       do not count the first N tokens that are evaluated one at a time\n"
    "  --batch N        tokens at a time before that (512)\n"
    "  -t N             threads (1)\n"
    "  --no-mmap        read the model into memory\n"
    "  --check-tensors  validate the weights while loading\n"
    "  --flash 0|1      flash attention (default: as the library chooses)\n"
    "  --repack 0|1     let the library repack weights (0)\n"
    "  --gpu-layers N   layers on a GPU (0)\n"
    "  --logits FILE    write the logits of every position, 32-bit floats\n"
    "  --experts FILE   write the chosen experts (MBLT v1)\n"
    "  --scores FILE    write what the routers sorted: u32 layer, experts, tokens, f32 [tokens][experts]\n"
    "  --verbose        show the library's messages\n"
    "The result is one line of JSON on stdout.\n";

[[noreturn]] void fail(const std::string & message) {
    throw std::runtime_error(message);
}

struct options {
    std::string model, tokens, prompt, forced, logits, experts, scores;
    int decode = 0, n = 0, warmup = 0, batch = 512, threads = 1, flash = -1, gpu_layers = 0;
    bool mmap = true, check = false, repack = false, verbose = false;
};

int number(const std::string & name, const char * text) {
    char * end = nullptr;
    errno = 0;
    const long value = strtol(text, &end, 10);
    if (errno != 0 || end == text || *end != '\0' || value < 0 || value > INT32_MAX) {
        fail(name + " " + text + " is not a number from 0 up");
    }
    return (int) value;
}

options parse(int argc, char ** argv) {
    options opt;
    for (int i = 1; i < argc; ++i) {
        const std::string name = argv[i];
        const auto value = [&] {
            if (++i == argc) {
                fail(name + " needs a value");
            }
            return argv[i];
        };
        if      (name == "-m")              { opt.model = value(); }
        else if (name == "--tokens")        { opt.tokens = value(); }
        else if (name == "--prompt")        { opt.prompt = value(); }
        else if (name == "--forced")        { opt.forced = value(); }
        else if (name == "--logits")        { opt.logits = value(); }
        else if (name == "--experts")       { opt.experts = value(); }
        else if (name == "--scores")        { opt.scores = value(); }
        else if (name == "--decode")        { opt.decode = number(name, value()); }
        else if (name == "-n")              { opt.n = number(name, value()); }
        else if (name == "--warmup")        { opt.warmup = number(name, value()); }
        else if (name == "--batch")         { opt.batch = number(name, value()); }
        else if (name == "-t")              { opt.threads = number(name, value()); }
        else if (name == "--flash")         { opt.flash = number(name, value()); }
        else if (name == "--repack")        { opt.repack = number(name, value()) != 0; }
        else if (name == "--gpu-layers")    { opt.gpu_layers = number(name, value()); }
        else if (name == "--no-mmap")       { opt.mmap = false; }
        else if (name == "--check-tensors") { opt.check = true; }
        else if (name == "--verbose")       { opt.verbose = true; }
        else if (name == "--json")          { } // it always is
        else if (name == "-h" || name == "--help") {
            fputs(usage, stdout);
            exit(0);
        } else {
            fail("there is no option " + name);
        }
    }
    if (opt.model.empty() || opt.tokens.empty() == opt.prompt.empty()) {
        fail("give -m, and either --tokens or --prompt");
    }
    if (opt.batch < 1 || opt.threads < 1) {
        fail("--batch and -t are at least 1");
    }
    return opt;
}

std::vector<llama_token> read_tokens(const std::string & path) {
    FILE * file = fopen(path.c_str(), "rb");
    if (file == nullptr) {
        fail(path + ": " + strerror(errno));
    }
    std::vector<llama_token> res;
    uint8_t b[4];
    size_t  n;
    while ((n = fread(b, 1, 4, file)) == 4) {
        res.push_back((llama_token) (b[0] | b[1] << 8 | b[2] << 16 | (uint32_t) b[3] << 24));
    }
    fclose(file);
    if (n != 0 || res.empty()) {
        fail(path + ": its size is not a multiple of 4 bytes, or it is empty");
    }
    return res;
}

struct out_file {
    std::string path;
    FILE * file = nullptr;

    void open(const std::string & name) {
        path = name;
        if (!path.empty() && (file = fopen(path.c_str(), "wb")) == nullptr) {
            fail(path + ": " + strerror(errno));
        }
    }
    void write(const void * data, size_t size) {
        if (file && fwrite(data, 1, size, file) != size) {
            fail(path + ": " + strerror(errno));
        }
    }
    void close() {
        if (file && fclose(file) != 0) {
            fail(path + ": " + strerror(errno));
        }
        file = nullptr;
    }
};

// the chosen experts and what they were chosen by, through the public eval callback
struct routing_writer {
    out_file experts, scores;
    bool started = false;
    std::vector<uint8_t> raw;

    static bool eval(ggml_tensor * t, bool ask, void * data) {
        int layer = -1, end = 0;
        const bool is_topk = sscanf(t->name, "ffn_moe_topk-%d%n", &layer, &end) == 1 && t->name[end] == '\0';
        if (!ask && is_topk && t->ne[1] > 0) {
            ((routing_writer *) data)->write(t, (uint32_t) layer);
        }
        return ask ? is_topk : true;
    }

    void write(const ggml_tensor * t, uint32_t layer) {
        const ggml_tensor * sorted = t->view_src ? t->view_src : t;
        if (!started) {
            const uint32_t head[3] = { 0x544C424D, 1, (uint32_t) sorted->ne[0] };
            experts.write(head, sizeof(head));
            started = true;
        }
        rows(experts, t, layer);
        if (scores.file && sorted->op == GGML_OP_ARGSORT && sorted->src[0]->type == GGML_TYPE_F32) {
            rows(scores, sorted->src[0], layer);
        }
    }

    // u32 layer, row length, rows; then the rows, of 4 bytes an element
    void rows(out_file & out, const ggml_tensor * t, uint32_t layer) {
        const uint32_t record[3] = { layer, (uint32_t) t->ne[0], (uint32_t) t->ne[1] };
        out.write(record, sizeof(record));
        raw.resize(ggml_nbytes(t));
        ggml_backend_tensor_get(t, raw.data(), 0, raw.size());
        for (int64_t i = 0; i < t->ne[1]; ++i) {
            out.write(raw.data() + i*t->nb[1], (size_t) t->ne[0]*4);
        }
    }
};

struct counters {
    double   seconds = 0;
    uint64_t majflt = 0, minflt = 0, read_bytes = 0;
    uint64_t wanted_reads = 0, wanted_bytes = 0, reads = 0, bytes = 0, errors = 0;
    double   wait_seconds = 0;

    static counters now() {
        counters c;
        c.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
        struct rusage use;
        if (getrusage(RUSAGE_SELF, &use) == 0) {
            c.majflt = (uint64_t) use.ru_majflt;
            c.minflt = (uint64_t) use.ru_minflt;
        }
        if (FILE * file = fopen("/proc/self/io", "r")) { // Linux only
            char line[128];
            while (fgets(line, sizeof(line), file)) {
                sscanf(line, "read_bytes: %" SCNu64, &c.read_bytes);
            }
            fclose(file);
        }
#ifdef MBOLT_PATCHED
        const auto t = llama_expert_prefetch_get_totals();
        c.wanted_reads = t.wanted_reads;
        c.wanted_bytes = t.wanted_bytes;
        c.reads        = t.reads;
        c.bytes        = t.bytes;
        c.errors       = t.errors;
        c.wait_seconds = t.microseconds/1e6;
#endif
        return c;
    }
};

std::string to_json(const char * name, int tokens, const counters & a, const counters & b) {
    const double seconds = b.seconds - a.seconds;
    char text[1024];
    snprintf(text, sizeof(text),
        "\"%s\": {\"tokens\": %d, \"seconds\": %.6f, \"tok_s\": %.4f, \"majflt\": %" PRIu64 ", \"minflt\": %" PRIu64
        ", \"read_bytes\": %" PRIu64 ", \"prefetch\": {\"wanted_reads\": %" PRIu64 ", \"wanted_bytes\": %" PRIu64
        ", \"reads\": %" PRIu64 ", \"bytes\": %" PRIu64 ", \"errors\": %" PRIu64 ", \"wait_seconds\": %.6f}}",
        name, tokens, seconds, seconds > 0 ? tokens/seconds : 0.0, b.majflt - a.majflt, b.minflt - a.minflt,
        b.read_bytes - a.read_bytes, b.wanted_reads - a.wanted_reads, b.wanted_bytes - a.wanted_bytes,
        b.reads - a.reads, b.bytes - a.bytes, b.errors - a.errors, b.wait_seconds - a.wait_seconds);
    return text;
}

// bytes that are not valid UTF-8 become U+FFFD
std::string quote(const std::string & text) {
    std::string res = "\"";
    for (size_t i = 0; i < text.size();) {
        const unsigned char c = (unsigned char) text[i];
        if (c < 0x80) {
            char buf[8];
            if (c == '"' || c == '\\') {
                res += '\\';
                res += (char) c;
            } else if (c < 0x20 || c == 0x7f) {
                snprintf(buf, sizeof(buf), "\\u%04x", c);
                res += buf;
            } else {
                res += (char) c;
            }
            ++i;
            continue;
        }
        const size_t n = c >= 0xf0 && c < 0xf5 ? 4 : c >= 0xe0 ? 3 : c >= 0xc2 ? 2 : 1;
        bool ok = n > 1 && c < 0xf5 && i + n <= text.size();
        for (size_t j = 1; ok && j < n; ++j) {
            ok = ((unsigned char) text[i + j] & 0xc0) == 0x80;
        }
        res += ok ? text.substr(i, n) : std::string("\xef\xbf\xbd");
        i += ok ? n : 1;
    }
    return res + "\"";
}

struct message_log {
    bool           verbose = false;
    ggml_log_level level   = GGML_LOG_LEVEL_NONE;
    std::string    last_error;

    static void write(ggml_log_level level, const char * text, void * data) {
        auto * log = (message_log *) data;
        if (level != GGML_LOG_LEVEL_CONT) {
            log->level = level;
        }
        if (log->level == GGML_LOG_LEVEL_ERROR && log->last_error.empty()) {
            log->last_error = text;
            log->last_error.erase(log->last_error.find_last_not_of("\n") + 1);
        }
        if (log->verbose || log->level == GGML_LOG_LEVEL_WARN || log->level == GGML_LOG_LEVEL_ERROR) {
            fputs(text, stderr);
        }
    }
};

struct run {
    llama_model   * model = nullptr;
    llama_context * ctx   = nullptr;
    int n_vocab = 0;
    int n_pos   = 0;
    out_file logits;

    ~run() {
        llama_free(ctx);
        llama_model_free(model);
    }

    void evaluate(const llama_token * tokens, int n) {
        llama_batch batch = llama_batch_init(n, 0, 1);
        batch.n_tokens = n;
        for (int i = 0; i < n; ++i) {
            batch.token[i]     = tokens[i];
            batch.pos[i]       = n_pos + i;
            batch.n_seq_id[i]  = 1;
            batch.seq_id[i][0] = 0;
            batch.logits[i]    = logits.file != nullptr || i == n - 1;
        }
        const int status = llama_decode(ctx, batch);
        llama_batch_free(batch);
        if (status != 0) {
            fail("llama_decode failed with status " + std::to_string(status));
        }
        n_pos += n;
        for (int i = 0; logits.file && i < n; ++i) {
            logits.write(llama_get_logits_ith(ctx, i), (size_t) n_vocab*sizeof(float));
        }
    }

    llama_token best() const {
        const float * last = llama_get_logits_ith(ctx, -1);
        return (llama_token) (std::max_element(last, last + n_vocab) - last);
    }
};

std::vector<llama_token> tokenize(const llama_vocab * vocab, const std::string & text) {
    const int n = -llama_tokenize(vocab, text.data(), (int32_t) text.size(), nullptr, 0, true, true);
    std::vector<llama_token> res(n > 0 ? n : 0);
    if (n <= 0 || llama_tokenize(vocab, text.data(), (int32_t) text.size(), res.data(), n, true, true) != n) {
        fail("the prompt cannot be tokenized");
    }
    return res;
}

int drive(int argc, char ** argv) {
    const options opt = parse(argc, argv);
    static message_log log;
    log.verbose = opt.verbose;
    llama_log_set(message_log::write, &log);
    llama_backend_init();

    const counters t0 = counters::now();
    run r;
    auto mparams = llama_model_default_params();
    mparams.n_gpu_layers    = opt.gpu_layers;
    mparams.load_mode       = opt.mmap ? LLAMA_LOAD_MODE_MMAP : LLAMA_LOAD_MODE_NONE;
    mparams.check_tensors   = opt.check;
    mparams.use_extra_bufts = opt.repack;
    r.model = llama_model_load_from_file(opt.model.c_str(), mparams);
    if (r.model == nullptr) {
        fail(opt.model + ": the model cannot be loaded: " + log.last_error);
    }
    const llama_vocab * vocab = llama_model_get_vocab(r.model);
    r.n_vocab = llama_vocab_n_tokens(vocab);

    std::vector<llama_token> tokens = opt.tokens.empty() ? tokenize(vocab, opt.prompt) : read_tokens(opt.tokens);
    int n_decode = std::min(opt.decode, (int) tokens.size());
    if (!opt.forced.empty()) {
        const auto forced = read_tokens(opt.forced);
        tokens.insert(tokens.end(), forced.begin(), forced.end());
        n_decode += (int) forced.size();
    }
    for (const llama_token token : tokens) {
        if (token < 0 || token >= r.n_vocab) {
            fail("token " + std::to_string(token) + " is not in the vocabulary of " + std::to_string(r.n_vocab));
        }
    }
    const int n_prefill = (int) tokens.size() - n_decode;

    routing_writer routing;
    routing.experts.open(opt.experts);
    routing.scores.open(opt.scores);
    r.logits.open(opt.logits);

    auto cparams = llama_context_default_params();
    cparams.n_ctx           = (uint32_t) tokens.size() + (uint32_t) opt.n + 1;
    cparams.n_batch         = (uint32_t) opt.batch;
    cparams.n_ubatch        = (uint32_t) opt.batch;
    cparams.n_threads       = opt.threads;
    cparams.n_threads_batch = opt.threads;
    if (opt.flash >= 0) {
        cparams.flash_attn_type = opt.flash ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    }
    if (routing.experts.file || routing.scores.file) {
        cparams.cb_eval           = routing_writer::eval;
        cparams.cb_eval_user_data = &routing;
    }
    r.ctx = llama_init_from_model(r.model, cparams);
    if (r.ctx == nullptr) {
        fail("a context cannot be made: " + log.last_error);
    }

    const counters t1 = counters::now();
    for (int i = 0; i < n_prefill; i += opt.batch) {
        r.evaluate(tokens.data() + i, std::min(opt.batch, n_prefill - i));
    }

    const counters t2 = counters::now();
    counters t3 = t2;
    std::vector<llama_token> chosen;
    std::string text;
    const int n_total = n_decode + opt.n;
    int n_warm = 0, n_done = 0;
    for (; n_done < n_total; ++n_done) {
        if (n_done == opt.warmup && n_done > 0) {
            t3     = counters::now();
            n_warm = n_done;
        }
        llama_token token;
        if (n_done < n_decode) {
            token = tokens[n_prefill + n_done];
        } else {
            token = r.best();
            chosen.push_back(token);
            char piece[256];
            const int n = llama_token_to_piece(vocab, token, piece, sizeof(piece), 0, true);
            text.append(piece, n > 0 ? n : 0);
            if (llama_vocab_is_eog(vocab, token)) {
                break;
            }
        }
        r.evaluate(&token, 1);
    }
    const counters t4 = counters::now();

    r.logits.close();
    routing.experts.close();
    routing.scores.close();

    struct rusage use = {};
    getrusage(RUSAGE_SELF, &use);
#ifdef __APPLE__
    const uint64_t peak = (uint64_t) use.ru_maxrss;
#else
    const uint64_t peak = (uint64_t) use.ru_maxrss*1024;
#endif

#ifdef MBOLT_PATCHED
    const char * patched = "true";
#else
    const char * patched = "false";
#endif
    std::string ids;
    for (const llama_token token : chosen) {
        ids += (ids.empty() ? "" : ", ") + std::to_string(token);
    }
    printf("{\"patched\": %s, \"model\": %s, \"n_vocab\": %d, \"positions\": %d, \"threads\": %d, \"peak_rss\": %" PRIu64
        ", %s, %s, %s, %s, \"tokens\": [%s], \"text\": %s}\n",
        patched, quote(opt.model).c_str(), r.n_vocab, r.n_pos, opt.threads, peak,
        to_json("load", 0, t0, t1).c_str(), to_json("prefill", n_prefill, t1, t2).c_str(),
        to_json("warmup", n_warm, t2, t3).c_str(), to_json("decode", n_done - n_warm, t3, t4).c_str(),
        ids.c_str(), quote(text).c_str());
    return 0;
}

} // namespace

int main(int argc, char ** argv) {
    try {
        return drive(argc, argv);
    } catch (const std::exception & err) {
        fprintf(stderr, "mbolt-driver: error: %s\n", err.what());
        return 2;
    }
}
