// library_forks BUNDLE: forks with an engine open, and prints how each child ended and what it was told.
#include <roofline.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>

namespace {

rl_options options() {
    rl_options made = RL_OPTIONS;
    made.threads = 3;
    made.cache_tokens = 512;
    return made;
}

// Closes in its destructor, as a wrapper in C++ does: of a static one that is run by exit(), in a child too.
struct Model {
    rl_engine* engine = nullptr;
    explicit Model(const char* path) {
        const rl_options made = options();
        if (rl_open(path, &made, &engine) != RL_OK) std::printf("not opened: %s\n", rl_last_error()), std::exit(9);
    }
    ~Model() { rl_close(&engine); }

    // The greedy ids after a prompt, as text.
    std::string answer() {
        rl_sampling sampling = RL_SAMPLING;
        sampling.temperature = 0, sampling.max_tokens = 8, sampling.ignore_eos = 1;
        const int32_t prompt[] = {5, 17, 200};
        rl_request request;
        if (rl_submit(engine, prompt, 3, &sampling, &request) != RL_OK) return rl_last_error();
        std::string ids;
        rl_event events[8];
        size_t count;
        rl_status status;
        while ((status = rl_step(engine, events, 8, &count)) == RL_OK)
            for (size_t i = 0; i < count; i++) ids += std::to_string(events[i].id) + " ";
        return status == RL_IDLE ? ids : rl_last_error();
    }
};

template <class Body> void child(const char* name, Body&& body) {
    std::fflush(stdout);
    const pid_t number = fork();
    if (number == 0) {
        alarm(30);  // a child that hangs ends by this signal
        body();
        std::exit(0);
    }
    int status = 0;
    waitpid(number, &status, 0);
    std::printf("%s: %s %d\n", name, WIFSIGNALED(status) ? "signal" : "exit",
                WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
}

void tell(const char* name, rl_status status) {
    std::printf("%s %d %s\n", name, status, std::strstr(rl_last_error(), "this is its fork") ? "fork" : rl_last_error());
}

void use_of_the_parent(rl_engine* engine) {
    rl_model_info info{};
    info.size = sizeof info;
    rl_request request;
    rl_event event;
    size_t count;
    char text[8];
    const int32_t id = 5;
    tell("info", rl_info(engine, &info));
    tell("submit", rl_submit(engine, &id, 1, nullptr, &request));
    tell("step", rl_step(engine, &event, 1, &count));
    tell("abort", rl_abort(engine, 1));
    tell("decode", rl_decode(engine, &id, 1, text, sizeof text, &count));
    rl_engine* copy = engine;
    const rl_status closed = rl_close(&engine);
    std::printf("close %d, NULL %d\n", closed, engine == nullptr);
    tell("again", rl_step(copy, &event, 1, &count));
}

}  // namespace

int main(int, char** words) {
    static Model model(words[1]);
    const std::string ids = model.answer();
    std::printf("%s\n", ids.c_str());
    child("exits", [] {});
    child("uses the parent's", [] { use_of_the_parent(model.engine); });
    child("opens its own", [&] {
        Model own(words[1]);
        std::printf("own %d\n", own.answer() == ids);
    });
    child("closes the parent's beside its own", [&] {
        Model own(words[1]);
        own.answer();
        rl_close(&model.engine);
        std::printf("own %d\n", own.answer() == ids);
    });
    std::atomic<bool> stop{false};
    std::thread busy([&] {
        while (!stop) model.answer();
    });
    for (int i = 0; i < 8; i++) child("forked within a step", [&] { Model own(words[1]); });
    stop = true;
    busy.join();
    std::printf("parent %d\n", model.answer() == ids);
}
