/* One pass over memory: bf16 gradient in, fp32 master and moments updated, bf16 weights out. AdamW.
 * What the tiles of shardwise.core.optim are measured against; benchmarks/adam.py compiles it where there is a compiler.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

typedef struct {
    float lr, beta1, beta2, eps, weight_decay, correction1, correction2, scale;
} rule_t;

static inline float widen(uint16_t half)
{
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Round to nearest, ties to even; not for NaN. */
static inline uint16_t narrow(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

void adam(float *restrict param, float *restrict exp_avg, float *restrict exp_avg_sq, const uint16_t *restrict grad,
          uint16_t *restrict out, int64_t numel, const rule_t *rule_given)
{
    const rule_t rule = *rule_given;
    const float step_size = rule.lr / rule.correction1;
    const float root = sqrtf(rule.correction2);
    const float keep = 1.0f - rule.lr * rule.weight_decay;
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < numel; i++) {
        float g = widen(grad[i]) * rule.scale;
        float m = rule.beta1 * exp_avg[i] + (1.0f - rule.beta1) * g;
        float v = rule.beta2 * exp_avg_sq[i] + (1.0f - rule.beta2) * g * g;
        float p = param[i] * keep - step_size * m / (sqrtf(v) / root + rule.eps);
        exp_avg[i] = m;
        exp_avg_sq[i] = v;
        param[i] = p;
        out[i] = narrow(p);
    }
}
