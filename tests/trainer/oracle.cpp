#include "tests/trainer/oracle.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

namespace terrace::trainer {

Values random_values(std::int64_t count, std::uint64_t seed, double deviation) {
  std::mt19937_64 bits(seed);
  Values values(static_cast<std::size_t>(count));
  for (double& value : values) {
    // The sum of uniforms, not std::normal_distribution: the same on every standard library.
    double sum = 0;
    for (int i = 0; i < 4; ++i) sum += static_cast<double>(bits() >> 11) * 0x1p-53 - 0.5;
    value = static_cast<double>(static_cast<float>(sum * std::sqrt(3.0) * deviation));
  }
  return values;
}

std::vector<std::int32_t> random_ints(std::int64_t count, std::uint64_t seed, std::int32_t below) {
  std::mt19937_64 bits(seed);
  std::vector<std::int32_t> values(static_cast<std::size_t>(count));
  for (std::int32_t& value : values) {
    value = static_cast<std::int32_t>(bits() % static_cast<std::uint64_t>(below));
  }
  return values;
}

double relative_error(const Values& a, const Values& b) {
  if (a.size() != b.size()) return std::numeric_limits<double>::infinity();
  double difference = 0, size = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (!std::isfinite(a[i]) || !std::isfinite(b[i])) return std::numeric_limits<double>::infinity();
    difference += (a[i] - b[i]) * (a[i] - b[i]);
    size += b[i] * b[i];
  }
  return size == 0 ? std::sqrt(difference) : std::sqrt(difference / size);
}

double inner(const Values& a, const Values& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b.at(i);
  return sum;
}

Values numeric_gradient(const std::function<double(const Values&)>& f, Values x, double step) {
  Values gradient(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double at = x[i];
    x[i] = at + step;
    const double above = f(x);
    x[i] = at - step;
    gradient[i] = (above - f(x)) / (2 * step);
    x[i] = at;
  }
  return gradient;
}

namespace oracle {
namespace {

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

}  // namespace

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
double softplus(double x) { return std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x))); }

Values matmul(const MatmulShape& s, const Values& a, const Values& b) {
  Values c(at(s.m * s.n));
  for (std::int64_t i = 0; i < s.m; ++i) {
    for (std::int64_t j = 0; j < s.n; ++j) {
      for (std::int64_t k = 0; k < s.k; ++k) {
        const double x = s.ta == Transpose::kNo ? a[at(i * s.k + k)] : a[at(k * s.m + i)];
        const double y = s.tb == Transpose::kNo ? b[at(k * s.n + j)] : b[at(j * s.k + k)];
        c[at(i * s.n + j)] += x * y;
      }
    }
  }
  return c;
}

Values rms_norm(const Values& x, const Values& w, double eps) {
  Values y(x.size());
  for (std::size_t row = 0; row < x.size(); row += w.size()) {
    double squares = 0;
    for (std::size_t i = 0; i < w.size(); ++i) squares += x[row + i] * x[row + i];
    const double r = 1 / std::sqrt(squares / static_cast<double>(w.size()) + eps);
    for (std::size_t i = 0; i < w.size(); ++i) y[row + i] = x[row + i] * r * w[i];
  }
  return y;
}

Values gated_rms_norm(const Values& o, const Values& w, const Values& gate, double eps) {
  Values y = rms_norm(o, w, eps);
  for (std::size_t i = 0; i < y.size(); ++i) y[i] *= sigmoid(gate[i]);
  return y;
}

Values layer_norm(const Values& x, const Values& w, const Values& b, double eps) {
  Values y(x.size());
  const auto width = static_cast<double>(w.size());
  for (std::size_t row = 0; row < x.size(); row += w.size()) {
    double mean = 0, variance = 0;
    for (std::size_t i = 0; i < w.size(); ++i) mean += x[row + i] / width;
    for (std::size_t i = 0; i < w.size(); ++i) variance += (x[row + i] - mean) * (x[row + i] - mean) / width;
    for (std::size_t i = 0; i < w.size(); ++i) {
      y[row + i] = (x[row + i] - mean) / std::sqrt(variance + eps) * w[i] + b[i];
    }
  }
  return y;
}

Values causal_conv(const ConvShape& s, const Values& x, const Values& w) {
  Values y(x.size());
  for (std::int64_t b = 0; b < s.batch; ++b) {
    for (std::int64_t t = 0; t < s.length; ++t) {
      for (std::int64_t c = 0; c < s.channels; ++c) {
        double z = 0;
        for (std::int64_t j = 0; j < s.taps; ++j) {
          const std::int64_t from = t - s.taps + 1 + j;
          if (from >= 0) z += w[at(c * s.taps + j)] * x[at((b * s.length + from) * s.channels + c)];
        }
        y[at((b * s.length + t) * s.channels + c)] = z * sigmoid(z);
      }
    }
  }
  return y;
}

Values situ_glu(const Values& g, const Values& u) {
  Values y(g.size());
  for (std::size_t i = 0; i < g.size(); ++i) {
    y[i] = 4 * std::tanh(g[i] / 4) * sigmoid(g[i]) * 25 * std::tanh(u[i] / 25);
  }
  return y;
}

double cross_entropy(const Values& hidden, const Values& weight, const std::vector<std::int32_t>& labels) {
  const std::size_t width = hidden.size() / labels.size(), words = weight.size() / width;
  double loss = 0;
  for (std::size_t t = 0; t < labels.size(); ++t) {
    if (labels[t] == -100) continue;
    Values logits(words);
    for (std::size_t v = 0; v < words; ++v) {
      for (std::size_t i = 0; i < width; ++i) logits[v] += hidden[t * width + i] * weight[v * width + i];
    }
    const double top = *std::max_element(logits.begin(), logits.end());
    double sum = 0;
    for (const double logit : logits) sum += std::exp(logit - top);
    loss += top + std::log(sum) - logits[static_cast<std::size_t>(labels[t])];
  }
  return loss;
}

}  // namespace oracle
}  // namespace terrace::trainer
