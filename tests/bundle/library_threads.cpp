// library_threads BUNDLE ISA: threads submit, step, abort, decode and close beside each other, on several engines. For the
// sanitisers: what is computed is compared elsewhere.
#include <roofline.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

namespace {

void demand(rl_status status) {
    if (status >= 0) return;
    std::fprintf(stderr, "%d %s\n", status, rl_last_error());
    std::exit(3);
}

rl_engine* opened(const char* bundle, const char* isa) {
    rl_options options = RL_OPTIONS;
    options.isa = isa, options.threads = 3, options.cache_tokens = 256, options.max_sequences = 4;
    options.max_step_tokens = 24;  // prompts in parts
    rl_engine* engine = nullptr;
    demand(rl_open(bundle, &options, &engine));
    return engine;
}

// Requests of several kinds, of which some are aborted.
void submit(rl_engine* engine, int thread) {
    const int32_t prompt[40] = {5, 17, 200, 3};
    for (int i = 0; i < 8; i++) {
        rl_sampling sampling = RL_SAMPLING;
        sampling.max_tokens = 6, sampling.seed = (uint64_t)(thread * 8 + i), sampling.logprobs = i & 1;
        sampling.temperature = (float)(i % 3), sampling.top_k = i % 4 * 3, sampling.repetition_penalty = 1.1f;
        rl_request request;
        demand(rl_submit(engine, prompt, (size_t)(1 + (thread * 13 + i * 7) % 40), &sampling, &request));
        if (i % 3 == 0) demand(rl_abort(engine, request));
    }
}

void step(rl_engine* engine, const std::atomic<int>& writers) {
    rl_event events[3];
    size_t count, length;
    char text[64];
    for (;;) {
        const bool last = writers.load() == 0;
        const rl_status status = rl_step(engine, events, 3, &count);
        demand(status);
        if (status == RL_IDLE && last) return;
        for (size_t i = 0; status == RL_OK && i < count; i++)
            if (events[i].id >= 0) demand(rl_decode(engine, &events[i].id, 1, text, sizeof text, &length));
    }
}

void work(const char* bundle, const char* isa) {
    rl_engine* engine = opened(bundle, isa);
    std::atomic<int> writers{2};
    std::vector<std::thread> threads;
    for (int i = 0; i < 2; i++) {
        threads.emplace_back([&, i] { submit(engine, i), writers--; });
        threads.emplace_back([&] { step(engine, writers); });
    }
    for (std::thread& thread : threads) thread.join();
    submit(engine, 2);
    rl_engine* copy = engine;
    std::thread stepping([copy] {  // until it is closed
        rl_event events[3];
        size_t count;
        while (rl_step(copy, events, 3, &count) == RL_OK) continue;
    });
    demand(rl_close(&engine));
    stepping.join();
}

}  // namespace

int main(int, char** words) {
    std::thread beside([&] { work(words[1], words[2]); });
    work(words[1], words[2]);
    beside.join();
    demand(rl_verify(words[1]));
    std::printf("done\n");
}
