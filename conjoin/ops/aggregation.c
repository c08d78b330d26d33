/* Sums, greatest values and dot products over the edges of a graph, row by row: what torch has no quick kernel for.

   `first[v] .. first[v + 1]` are the edges of row v, `others[e]` is the row at the other end of edge e. A row of x is
   `heads * width` numbers; an edge has a weight for every head, or none. Rows are dealt to threads in chunks, since some
   have many edges and some none. No two threads write the same row, so that sums come out alike whatever the threads. */

#if defined(__linux__)
#define _DEFAULT_SOURCE
#include <sys/mman.h>
#endif
#include <stdint.h>
#include <string.h>

#define ROWS_AT_ONCE 64
#define AHEAD 8 /* edges whose rows are fetched while one is added */
#define LINE 64

/* Vectors as wide as registers are, and how many of them are added up at once, in registers. */
#if defined(__AVX512F__)
#define VECTOR 64
#define SPAN 8
#elif defined(__AVX__)
#define VECTOR 32
#define SPAN 8
#else
#define VECTOR 16
#if defined(__aarch64__)
#define SPAN 16
#else
#define SPAN 8
#endif
#endif

/* Ask for large pages where much is about to be written: the system then makes fewer of them, and whoever reads rows here
   and there finds them sooner. It is a wish; memory that has been written to before stays as it is. */
#define LARGE_PAGE ((uintptr_t)1 << 21)

void ask_for_large_pages(void *at, int64_t bytes) {
#if defined(MADV_HUGEPAGE)
    const uintptr_t start = ((uintptr_t)at + LARGE_PAGE - 1) & ~(LARGE_PAGE - 1);
    const uintptr_t stop = ((uintptr_t)at + (uintptr_t)bytes) & ~(LARGE_PAGE - 1);
    if (start < stop) madvise((void *)start, stop - start, MADV_HUGEPAGE);
#else
    (void)at, (void)bytes;
#endif
}

/* The edges of a row over COUNT vectors from `at` on, of which the last begins at `tail`: it may cover some of the one
   before once more. */
#define ADD_UP(T, NAME, COUNT)                                                                                         \
    case COUNT: {                                                                                                      \
        vector_##NAME sums[COUNT];                                                                                     \
        for (int k = 0; k < COUNT; k++) sums[k] = (vector_##NAME){0};                                                  \
        for (int64_t e = first[v]; e < first[v + 1]; e++) {                                                            \
            if (at == 0 && e + AHEAD < num_edges) {                                                                    \
                const char *next = (const char *)(x + (int64_t)others[e + AHEAD] * n);                                 \
                for (int64_t i = 0; i < n * (int64_t)sizeof(T); i += LINE) __builtin_prefetch(next + i);               \
            }                                                                                                          \
            const T *r = x + (int64_t)others[e] * n + at;                                                              \
            const T w = weight ? weight[e * heads + h] : 1;                                                            \
            for (int k = 0; k < COUNT; k++) {                                                                          \
                vector_##NAME y;                                                                                       \
                memcpy(&y, r + (k < COUNT - 1 ? k * lanes : tail), VECTOR);                                            \
                sums[k] += w * y;                                                                                      \
            }                                                                                                          \
        }                                                                                                              \
        for (int k = 0; k < COUNT; k++) memcpy(o + at + (k < COUNT - 1 ? k * lanes : tail), &sums[k], VECTOR);         \
        break;                                                                                                         \
    }

#define UP_TO_8(T, NAME)                                                                                               \
    ADD_UP(T, NAME, 1)                                                                                                 \
    ADD_UP(T, NAME, 2)                                                                                                 \
    ADD_UP(T, NAME, 3)                                                                                                 \
    ADD_UP(T, NAME, 4)                                                                                                 \
    ADD_UP(T, NAME, 5)                                                                                                 \
    ADD_UP(T, NAME, 6)                                                                                                 \
    ADD_UP(T, NAME, 7)                                                                                                 \
    ADD_UP(T, NAME, 8)

#if SPAN == 8
#define UP_TO_SPAN(T, NAME) UP_TO_8(T, NAME)
#else
#define UP_TO_SPAN(T, NAME)                                                                                            \
    UP_TO_8(T, NAME)                                                                                                   \
    ADD_UP(T, NAME, 9)                                                                                                 \
    ADD_UP(T, NAME, 10)                                                                                                \
    ADD_UP(T, NAME, 11)                                                                                                \
    ADD_UP(T, NAME, 12)                                                                                                \
    ADD_UP(T, NAME, 13)                                                                                                \
    ADD_UP(T, NAME, 14)                                                                                                \
    ADD_UP(T, NAME, 15)                                                                                                \
    ADD_UP(T, NAME, 16)
#endif

#define KERNELS(T, NAME)                                                                                               \
    typedef T vector_##NAME __attribute__((vector_size(VECTOR)));                                                      \
                                                                                                                       \
    void sum_##NAME(const T *x, const int64_t *first, const int32_t *others, const T *weight, T *out, int64_t rows,    \
                    int64_t heads, int64_t width, int threads) {                                                       \
        const int64_t n = heads * width, lanes = VECTOR / sizeof(T), num_edges = first[rows];                          \
        _Pragma("omp parallel for schedule(dynamic, ROWS_AT_ONCE) num_threads(threads)") for (int64_t v = 0; v < rows; \
                                                                                              v++) {                   \
            T *restrict o = out + v * n;                                                                               \
            for (int64_t h = 0; width >= lanes && h < heads; h++)                                                      \
                for (int64_t done = 0; done < width; done += SPAN * lanes) {                                           \
                    const int64_t at = h * width + done, left = width - done;                                          \
                    const int64_t count = left > SPAN * lanes ? SPAN : (left + lanes - 1) / lanes;                     \
                    const int64_t tail = left > SPAN * lanes ? (SPAN - 1) * lanes : left - lanes;                      \
                    switch (count) { UP_TO_SPAN(T, NAME) }                                                             \
                }                                                                                                      \
            for (int64_t i = 0; width < lanes && i < n; i++) o[i] = 0;                                                 \
            for (int64_t e = first[v]; width < lanes && e < first[v + 1]; e++) {                                       \
                if (e + AHEAD < num_edges) __builtin_prefetch(x + (int64_t)others[e + AHEAD] * n);                     \
                const T *restrict r = x + (int64_t)others[e] * n;                                                      \
                for (int64_t h = 0; h < heads; h++) {                                                                  \
                    const T w = weight ? weight[e * heads + h] : 1;                                                    \
                    for (int64_t i = h * width; i < (h + 1) * width; i++) o[i] += w * r[i];                            \
                }                                                                                                      \
            }                                                                                                          \
        }                                                                                                              \
    }                                                                                                                  \
                                                                                                                       \
    /* The greatest of the rows at the other ends, 0 where there is none, and how many of them are as great. */        \
    void greatest_##NAME(const T *x, const int64_t *first, const int32_t *others, T *out, T *ties, int64_t rows,       \
                         int64_t n, int threads) {                                                                     \
        _Pragma("omp parallel for schedule(dynamic, ROWS_AT_ONCE) num_threads(threads)") for (int64_t v = 0; v < rows; \
                                                                                              v++) {                   \
            T *restrict o = out + v * n, *restrict t = ties + v * n;                                                   \
            for (int64_t i = 0; i < n; i++) o[i] = t[i] = 0;                                                           \
            for (int64_t e = first[v]; e < first[v + 1]; e++) {                                                        \
                const T *restrict r = x + (int64_t)others[e] * n;                                                      \
                for (int64_t i = 0; i < n; i++) {                                                                      \
                    if (e == first[v] || r[i] > o[i] || r[i] != r[i]) {                                                \
                        o[i] = r[i];                                                                                   \
                        t[i] = 1;                                                                                      \
                    } else if (r[i] == o[i]) {                                                                         \
                        t[i] += 1;                                                                                     \
                    }                                                                                                  \
                }                                                                                                      \
            }                                                                                                          \
        }                                                                                                              \
    }                                                                                                                  \
                                                                                                                       \
    /* What of the gradients comes back to a row: a share from every row whose greatest it is. */                      \
    void shares_##NAME(const T *x, const int64_t *first, const int32_t *others, const T *greatest, const T *shared,    \
                       T *out, int64_t rows, int64_t n, int threads) {                                                 \
        _Pragma("omp parallel for schedule(dynamic, ROWS_AT_ONCE) num_threads(threads)") for (int64_t u = 0; u < rows; \
                                                                                              u++) {                   \
            T *restrict o = out + u * n;                                                                               \
            const T *restrict r = x + u * n;                                                                           \
            for (int64_t i = 0; i < n; i++) o[i] = 0;                                                                  \
            for (int64_t e = first[u]; e < first[u + 1]; e++) {                                                        \
                const T *restrict m = greatest + (int64_t)others[e] * n, *restrict g = shared + (int64_t)others[e] * n; \
                for (int64_t i = 0; i < n; i++) o[i] += r[i] == m[i] ? g[i] : 0;                                       \
            }                                                                                                          \
        }                                                                                                              \
    }                                                                                                                  \
                                                                                                                       \
    /* For every edge and head the product of the rows at both ends: the gradient of its weight. */                    \
    void dots_##NAME(const T *x, const int64_t *first, const int32_t *others, const T *y, T *out, int64_t rows,        \
                     int64_t heads, int64_t width, int threads) {                                                      \
        const int64_t n = heads * width;                                                                               \
        _Pragma("omp parallel for schedule(dynamic, ROWS_AT_ONCE) num_threads(threads)") for (int64_t v = 0; v < rows; \
                                                                                              v++)                     \
            for (int64_t e = first[v]; e < first[v + 1]; e++)                                                          \
                for (int64_t h = 0; h < heads; h++) {                                                                  \
                    const T *restrict r = x + (int64_t)others[e] * n + h * width, *restrict s = y + v * n + h * width; \
                    T sum = 0;                                                                                         \
                    for (int64_t i = 0; i < width; i++) sum += r[i] * s[i];                                            \
                    out[e * heads + h] = sum;                                                                          \
                }                                                                                                      \
    }

KERNELS(float, float)
KERNELS(double, double)
