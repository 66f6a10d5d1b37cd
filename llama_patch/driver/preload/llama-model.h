// What the patches' sources use of the header by this name, for libmbolt-preload: what a graph shows
// of a model.
#pragma once

#include "ggml.h"

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#define LLAMA_MAX_LAYERS 512

struct llama_model {
    struct {
        uint32_t n_expert = 0;
    } hparams;

    std::vector<std::pair<std::string, ggml_tensor *>> tensors_by_name;

    const ggml_tensor * get_tensor(const char * name) const {
        for (const auto & it : tensors_by_name) {
            if (it.first == name) {
                return it.second;
            }
        }
        return nullptr;
    }
};
