// A bundle that runs: requests in, events out.
#pragma once
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "bundle.h"
#include "roofline.h"
#include "scheduler.h"
#include "vocabulary.h"

namespace roofline {

class Engine {
  public:
    // Throws Failure, as all that follows.
    Engine(const std::string& path, const rl_options& options);

    void describe(rl_model_info& info) const;
    rl_request submit(const int32_t* ids, size_t count, const rl_sampling& sampling);
    void abort(rl_request request);
    rl_status step(rl_event* events, size_t capacity, size_t* count);
    std::string decode(const int32_t* ids, size_t count);

  private:
    void size_step(const rl_options& options);
    void bind(const std::string& isa, int threads, const uint8_t* image);
    void take_inbox();
    void compute(const StepPlan& plan);
    void fill(const StepPlan& plan);
    std::vector<int32_t> sample(const StepPlan& plan);
    void end(const std::shared_ptr<Sequence>& sequence);

    Bundle bundle_;
    std::unique_ptr<Image> image_;
    std::string isa_, fingerprint_;
    int threads_ = 0;
    int64_t max_length_ = 0;
    StepLimits limits_;
    StepSizes sizes_;
    std::vector<int32_t> batch_;   // one buffer, laid out as ops/batch.py says
    std::vector<int64_t> fields_;  // where each field begins in it
    std::vector<float> logprobs_;  // of the last step's samples
    std::unique_ptr<Memory> arena_, cache_, state_;
    std::unique_ptr<Executable> core_;

    std::mutex stepping_;  // guards the scheduler and the events
    std::unique_ptr<Scheduler> scheduler_;
    std::deque<rl_event> events_;

    struct Command {  // a new sequence, or the end of a request
        std::shared_ptr<Sequence> sequence;
        rl_request ended;
    };
    std::mutex inbox_lock_;
    std::vector<Command> inbox_;
    rl_request last_request_ = 0;

    std::mutex words_lock_;
    std::unique_ptr<Vocabulary> words_;  // read when it is first needed
};

}  // namespace roofline
