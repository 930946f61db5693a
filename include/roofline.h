/* libroofline: a bundle answers prompts, without Python. docs/how-to/library.md has a whole program.
 *
 * Ids go in, ids come out. For the same bundle, prompt, sampling parameters and seed they are those of Roofline's other
 * front doors, whatever else runs beside them.
 *
 * Every function returns a status: RL_OK, RL_IDLE (rl_step only), or an error below zero, for which rl_last_error() has
 * the cause and what to do. A result is written only on RL_OK. Nothing is printed, and no error ends the process.
 *
 * Threads: every function may be called from any thread. Calls of rl_step on one engine take turns; rl_submit and
 * rl_abort do not wait for a step. A child made by fork() has its parent's engines without their threads: rl_close frees
 * what the child holds of them, every other function refuses them (RL_ERROR_INVALID). It opens engines of its own.
 */
#ifndef ROOFLINE_H
#define ROOFLINE_H

#include <stddef.h>
#include <stdint.h>

#define RL_VERSION_MAJOR 0
#define RL_VERSION_MINOR 1
#define RL_VERSION_PATCH 0
#define RL_VERSION (RL_VERSION_MAJOR * 10000 + RL_VERSION_MINOR * 100 + RL_VERSION_PATCH)

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define RL_API __attribute__((visibility("default")))
#else
#define RL_API
#endif

typedef enum rl_status {
    RL_OK = 0,
    RL_IDLE = 1,               /* nothing to compute and nothing to tell */
    RL_ERROR_INVALID = -1,     /* an argument that cannot be used */
    RL_ERROR_BUNDLE = -2,      /* no bundle, damaged, or of another version */
    RL_ERROR_UNSUPPORTED = -3, /* this chip or this build cannot do it */
    RL_ERROR_CAPACITY = -4,    /* it can never fit */
    RL_ERROR_MEMORY = -5,      /* memory, threads or open files are used up */
    RL_ERROR_INTERNAL = -6     /* a bug of ours */
} rl_status;

typedef enum rl_finish {
    RL_RUNNING = 0,
    RL_STOP = 1,   /* at an end-of-generation or stop id, which is the event's id */
    RL_LENGTH = 2, /* max_tokens, or the longest context */
    RL_ABORT = 3,  /* rl_abort */
    RL_FAILED = 4  /* the step failed, or the logits were not numbers */
} rl_finish;

typedef struct rl_engine rl_engine;
typedef uint64_t rl_request; /* never 0, never given twice by an engine */

/* Begin with `rl_options options = RL_OPTIONS;`. Zero and NULL take what is said in brackets. */
typedef struct rl_options {
    size_t size;             /* sizeof(rl_options) */
    const char* isa;         /* "avx512", "avx2", "neon", "portable" [ROOFLINE_ISA, or the best of this chip] */
    int32_t threads;         /* that compute, the caller's among them [ROOFLINE_THREADS, or the usable cores] */
    int32_t max_sequences;   /* computed at a time; more wait [64] */
    int32_t max_length;      /* prompt and answer, in tokens [what the model and the cache allow] */
    int32_t max_step_tokens; /* of prompts and answers in one step, at least max_sequences [512] */
    int64_t cache_tokens;    /* of all sequences together [16384, or what a quarter of the free memory holds] */
} rl_options;
#define RL_OPTIONS {sizeof(rl_options), NULL, 0, 0, 0, 0, 0}

/* Begin with `rl_sampling sampling = RL_SAMPLING;`: temperature 1, nothing else switched on, seed 0. */
typedef struct rl_sampling {
    size_t size;              /* sizeof(rl_sampling) */
    float temperature;        /* 0 takes the most likely id */
    float top_p;              /* above 0, at most 1: off */
    float min_p;              /* 0 to 1; 0: off */
    float repetition_penalty; /* above 0; 1: off */
    float presence_penalty;   /* -2 to 2; 0: off */
    float frequency_penalty;  /* -2 to 2; 0: off */
    int32_t top_k;            /* 0: off */
    uint64_t seed;            /* the same seed gives the same answer to the same prompt */
    int32_t sample_index;     /* which of several answers to one prompt and seed: another index, another answer */
    int32_t max_tokens;       /* 0: up to the longest context */
    int32_t min_tokens;       /* stop ids are banned until then */
    int32_t ignore_eos;       /* not 0: do not end at the model's own end-of-generation ids */
    int32_t logprobs;         /* not 0: events carry the log-probability of their id */
    const int32_t* stop_ids;  /* more ids that end the answer */
    size_t stop_count;
    const int32_t* bias_ids;  /* each once; */
    const float* bias_values; /* -100 to 100, added to their logits */
    size_t bias_count;
} rl_sampling;
#define RL_SAMPLING {sizeof(rl_sampling), 1, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, NULL, 0, NULL, NULL, 0}

/* One new id of a request, or its end. The event with a `finish` is the last of its request. */
typedef struct rl_event {
    rl_request request;
    int32_t id;     /* -1: none, with RL_ABORT and RL_FAILED */
    int32_t finish; /* rl_finish */
    float logprob;  /* natural logarithm, of the raw logits; NaN where it was not asked for */
    int32_t index;  /* of the id in the answer, from 0 */
} rl_event;

/* Strings and arrays live as long as the engine. */
typedef struct rl_model_info {
    size_t size;             /* sizeof(rl_model_info), set by the caller */
    const char* name;        /* the model's */
    const char* bundle;      /* the bundle's id: 64 hexadecimal digits */
    const char* fingerprint; /* equal where ids are promised to be equal: 32 digits */
    const char* isa;
    int32_t threads;
    int32_t vocab_size;
    int32_t max_length; /* longest prompt and answer together */
    int32_t bos_id;     /* -1: none. A prompt of plain text begins with it where add_bos is set */
    int32_t add_bos;
    int32_t max_sequences;
    int64_t cache_tokens;
    const int32_t* eos_ids; /* end a generation */
    size_t eos_count;
} rl_model_info;

/* RL_VERSION of the library that runs, which may be newer than this header. */
RL_API int rl_version(void);

/* The reason of this thread's last error: one line, never NULL; valid until the next error on this thread. */
RL_API const char* rl_last_error(void);

/* Opens the bundle in the directory `path`; options may be NULL. */
RL_API rl_status rl_open(const char* path, const rl_options* options, rl_engine** engine);

/* Ends all requests, without events, frees the engine, and sets *engine to NULL. NULL and a pointer to NULL are left
 * alone. Every function refuses copies of a closed handle. Another thread's call that runs meanwhile runs to its end.
 */
RL_API rl_status rl_close(rl_engine** engine);

/* Reads every byte of the bundle in the directory `path` and compares every file with its hash in manifest.json, which
 * rl_open leaves out: a gigabyte takes seconds. RL_ERROR_BUNDLE names the first file that is not as it was written. */
RL_API rl_status rl_verify(const char* path);

RL_API rl_status rl_info(rl_engine* engine, rl_model_info* info);

/* Queues a prompt of `count` ids; all that is pointed to is copied. sampling NULL is RL_SAMPLING. */
RL_API rl_status rl_submit(rl_engine* engine, const int32_t* ids, size_t count, const rl_sampling* sampling,
                           rl_request* request);

/* Computes one step of all requests together and writes what happened to `events`, at most `capacity` of them. What
 * finds no room comes first the next time, before another step is computed. RL_OK with *count 0 is a step that only
 * read prompts; RL_IDLE: nothing is left to do. An error: this step's requests have failed, their events come next. */
RL_API rl_status rl_step(rl_engine* engine, rl_event* events, size_t capacity, size_t* count);

/* Ends a request: its last event comes with the next step. One that has ended is left alone. */
RL_API rl_status rl_abort(rl_engine* engine, rl_request request);

/* The bytes of ids, special ones left out, without a terminating zero. A character may be spread over several ids, so
 * the bytes of a part may be no whole UTF-8. `buffer` gets at most `capacity` bytes, *length is what there are: where
 * it is more, call again with a larger buffer. Refused where the bundle has no tokenizer. */
RL_API rl_status rl_decode(rl_engine* engine, const int32_t* ids, size_t count, char* buffer, size_t capacity,
                           size_t* length);

#ifdef __cplusplus
}
#endif
#endif
