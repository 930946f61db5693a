/* Answers many requests together. A request is a line of numbers on standard input, in the order of `read_request`; an event
 * is a line on standard output: number of the request, id, finish, log-probability. */
#include <roofline.h>
#include <stdio.h>
#include <stdlib.h>

#define MOST 4096

static double number(void) {
    double value = 0;
    if (scanf("%lf", &value) != 1) exit(3);
    return value;
}

static size_t ids(int32_t *out) {
    size_t i, count = (size_t)number();
    for (i = 0; i < count; i++) out[i] = (int32_t)number();
    return count;
}

static rl_status read_request(rl_engine *engine, rl_request *request) {
    static int32_t prompt[MOST], stops[MOST], biased[MOST];
    static float values[MOST];
    rl_sampling s = RL_SAMPLING;
    unsigned long long seed;
    size_t count, i;
    s.temperature = (float)number(), s.top_k = (int32_t)number(), s.top_p = (float)number(), s.min_p = (float)number();
    s.repetition_penalty = (float)number(), s.presence_penalty = (float)number(), s.frequency_penalty = (float)number();
    if (scanf("%llu", &seed) != 1) exit(3);
    s.seed = seed, s.sample_index = (int32_t)number();
    s.max_tokens = (int32_t)number(), s.min_tokens = (int32_t)number();
    s.ignore_eos = (int32_t)number(), s.logprobs = (int32_t)number();
    s.stop_count = ids(stops), s.stop_ids = stops;
    s.bias_count = ids(biased), s.bias_ids = biased, s.bias_values = values;
    for (i = 0; i < s.bias_count; i++) values[i] = (float)number();
    count = ids(prompt);
    return rl_submit(engine, prompt, count, &s, request);
}

/* library_requests BUNDLE ISA THREADS CACHE_TOKENS MAX_LENGTH MAX_SEQUENCES MAX_STEP_TOKENS REQUESTS */
int main(int argc, char **argv) {
    rl_options options = RL_OPTIONS;
    rl_engine *engine = NULL;
    rl_event events[7];
    rl_request request;
    size_t count, i;
    int status, requests;
    if (argc != 9) return 2;
    options.isa = argv[2], options.threads = atoi(argv[3]), options.cache_tokens = atoi(argv[4]);
    options.max_length = atoi(argv[5]), options.max_sequences = atoi(argv[6]), options.max_step_tokens = atoi(argv[7]);
    if (rl_open(argv[1], &options, &engine) != RL_OK) goto failed;
    for (requests = atoi(argv[8]); requests > 0; requests--)
        if (read_request(engine, &request) != RL_OK) goto failed;
    while ((status = rl_step(engine, events, 7, &count)) == RL_OK)
        for (i = 0; i < count; i++)
            printf("%d %d %d %.9g\n", (int)events[i].request, events[i].id, events[i].finish, (double)events[i].logprob);
    if (status != RL_IDLE) goto failed;
    rl_close(&engine);
    return 0;
failed:
    fprintf(stderr, "%s\n", rl_last_error());
    return 1;
}
