/* Sums, greatest values and dot products over the edges of a graph, row by row: what torch has no quick kernel for.

   `first[v] .. first[v + 1]` are the edges of row v, `others[e]` is the row at the other end of edge e. A row of x is
   `heads * width` numbers; an edge has a weight for every head, or none. Rows are dealt to threads in chunks, since some
   have many edges and some none. No two threads write the same row, so that sums come out alike whatever the threads. */

#include <stdint.h>

#define ROWS_AT_ONCE 64
#define AHEAD 4 /* edges whose rows are fetched while one is added */
#define LINE 64
#define TILE 64 /* numbers of a row that are added up at once: four of the widest registers in single precision */

#define KERNELS(T, NAME)                                                                                               \
    void sum_##NAME(const T *x, const int64_t *first, const int32_t *others, const T *weight, const T *scale, T *out,  \
                    int64_t rows, int64_t heads, int64_t width, int threads) {                                         \
        const int64_t n = heads * width;                                                                               \
        _Pragma("omp parallel for schedule(dynamic, ROWS_AT_ONCE) num_threads(threads)") for (int64_t v = 0; v < rows; \
                                                                                              v++) {                   \
            T *restrict o = out + v * n;                                                                               \
            const int64_t last = first[v + 1], tiled = heads == 1 ? n - n % TILE : 0;                                  \
            for (int64_t t = 0; t < tiled; t += TILE) { /* sums that stay in registers */                              \
                T sums[TILE] = {0};                                                                                    \
                for (int64_t e = first[v]; e < last; e++) {                                                            \
                    if (t == 0 && e + AHEAD < last) {                                                                  \
                        const char *next = (const char *)(x + (int64_t)others[e + AHEAD] * n);                         \
                        for (int64_t i = 0; i < n * (int64_t)sizeof(T); i += LINE) __builtin_prefetch(next + i);       \
                    }                                                                                                  \
                    const T *restrict r = x + (int64_t)others[e] * n + t;                                              \
                    const T w = weight ? weight[e] : 1;                                                                \
                    for (int i = 0; i < TILE; i++) sums[i] += w * r[i];                                                \
                }                                                                                                      \
                for (int i = 0; i < TILE; i++) o[t + i] = sums[i];                                                     \
            }                                                                                                          \
            for (int64_t i = tiled; i < n; i++) o[i] = 0;                                                              \
            for (int64_t e = first[v]; tiled < n && e < last; e++) {                                                   \
                if (tiled == 0 && e + AHEAD < last) {                                                                  \
                    const char *next = (const char *)(x + (int64_t)others[e + AHEAD] * n);                             \
                    for (int64_t i = 0; i < n * (int64_t)sizeof(T); i += LINE) __builtin_prefetch(next + i);           \
                }                                                                                                      \
                const T *restrict r = x + (int64_t)others[e] * n;                                                      \
                if (!weight) {                                                                                         \
                    for (int64_t i = tiled; i < n; i++) o[i] += r[i];                                                  \
                } else {                                                                                               \
                    for (int64_t h = 0; h < heads; h++) {                                                              \
                        const T w = weight[e * heads + h];                                                             \
                        for (int64_t i = h * width + tiled; i < (h + 1) * width; i++) o[i] += w * r[i];                \
                    }                                                                                                  \
                }                                                                                                      \
            }                                                                                                          \
            if (scale) {                                                                                               \
                const T s = scale[v];                                                                                  \
                for (int64_t i = 0; i < n; i++) o[i] *= s;                                                             \
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
