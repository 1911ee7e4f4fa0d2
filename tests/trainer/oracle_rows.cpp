#include "tests/trainer/oracle_rows.hpp"

#include <algorithm>
#include <cmath>

namespace terrace::trainer::oracle {
namespace {

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

struct Mix {
  Values logit, inverse, probability;
};
Mix mix_of(const AttnResValues& in, std::size_t row) {
  const std::size_t width = at(in.width), first = row * width;
  Mix mix;
  for (const Values& v : in.v) {
    double squares = 0, along = 0;
    for (std::size_t i = 0; i < width; ++i) {
      squares += v[first + i] * v[first + i];
      along += v[first + i] * in.w[i] * in.q[i];
    }
    mix.inverse.push_back(1 / std::sqrt(squares / static_cast<double>(width) + in.eps));
    mix.logit.push_back(mix.inverse.back() * along);
  }
  const double top = *std::max_element(mix.logit.begin(), mix.logit.end());
  double total = 0;
  for (const double logit : mix.logit) total += std::exp(logit - top);
  for (const double logit : mix.logit) mix.probability.push_back(std::exp(logit - top) / total);
  return mix;
}

}  // namespace

Values attn_res(const AttnResValues& in) {
  Values h(in.v[0].size());
  const std::size_t width = at(in.width);
  for (std::size_t row = 0; row * width < h.size(); ++row) {
    const Mix mix = mix_of(in, row);
    for (std::size_t l = 0; l < in.v.size(); ++l) {
      for (std::size_t i = 0; i < width; ++i)
        h[row * width + i] += mix.probability[l] * in.v[l][row * width + i];
    }
  }
  return h;
}

Values attn_res_probability(const AttnResValues& in) {
  Values all;
  for (std::size_t row = 0; row * at(in.width) < in.v[0].size(); ++row) {
    const Mix mix = mix_of(in, row);
    all.insert(all.end(), mix.probability.begin(), mix.probability.end());
  }
  return all;
}

AttnResGradients attn_res_backward(const AttnResValues& in, const Values& d_h) {
  const std::size_t width = at(in.width);
  AttnResGradients d{std::vector<Values>(in.v.size(), Values(d_h.size())), Values(width), Values(width)};
  for (std::size_t first = 0; first < d_h.size(); first += width) {
    const Mix mix = mix_of(in, first / width);
    Values along(in.v.size());
    double mean = 0;
    for (std::size_t l = 0; l < in.v.size(); ++l) {
      for (std::size_t i = 0; i < width; ++i) along[l] += in.v[l][first + i] * d_h[first + i];
      mean += mix.probability[l] * along[l];
    }
    for (std::size_t l = 0; l < in.v.size(); ++l) {
      const double d_logit = mix.probability[l] * (along[l] - mean), r = mix.inverse[l];
      for (std::size_t i = 0; i < width; ++i) {
        const double v = in.v[l][first + i], wq = in.w[i] * in.q[i];
        d.v[l][first + i] = mix.probability[l] * d_h[first + i] +
                            d_logit * r * (wq - v * r * mix.logit[l] / static_cast<double>(width));
        d.w[i] += d_logit * r * v * in.q[i];
        d.q[i] += d_logit * r * v * in.w[i];
      }
    }
  }
  return d;
}

Values packed_conv(const ConvShape& shape, const std::vector<std::int32_t>& starts, const Values& x,
                   const Values& w) {
  Values y;
  for (std::size_t i = 0; i + 1 < starts.size(); ++i) {
    const ConvShape one{1, starts[i + 1] - starts[i], shape.channels, shape.taps};
    const Values part = causal_conv(
        one, Values(x.begin() + starts[i] * shape.channels, x.begin() + starts[i + 1] * shape.channels), w);
    y.insert(y.end(), part.begin(), part.end());
  }
  return y;
}

Values rotary(const RotaryShape& shape, const Values& head, double position) {
  Values y = head;
  const std::int64_t pairs = shape.rotary_width / 2;
  for (std::int64_t i = 0; i < pairs; ++i) {
    const double angle = position * std::pow(shape.theta, -2.0 * static_cast<double>(i) /
                                                              static_cast<double>(shape.rotary_width));
    const bool halves = shape.layout == RotaryLayout::kHalf;
    const std::int64_t first = shape.offset + (halves ? i : 2 * i), second = first + (halves ? pairs : 1);
    const double a = head[at(first)], b = head[at(second)];
    y[at(first)] = a * std::cos(angle) - b * std::sin(angle);
    y[at(second)] = b * std::cos(angle) + a * std::sin(angle);
  }
  return y;
}

Values muon(const Muon& muon, const Values& parameter, const Values& gradient, Values& momentum) {
  const double a = 3.4445, b = -4.7750, c = 2.0315;
  const std::int64_t m = muon.rows, n = muon.columns;
  Values x(parameter.size());
  for (std::size_t i = 0; i < x.size(); ++i) {
    momentum[i] = static_cast<double>(muon.momentum_factor) * momentum[i] + gradient[i];
    const bool nesterov = muon.kind == MuonMomentum::kNesterov;
    x[i] = nesterov ? static_cast<double>(muon.momentum_factor) * momentum[i] + gradient[i] : momentum[i];
  }
  const double norm = std::sqrt(inner(x, x)) + 1e-7;
  for (double& value : x) value /= norm;
  for (int step = 0; step < 5; ++step) {
    const Values gram = matmul({m, m, n, Transpose::kNo, Transpose::kYes}, x, x);
    Values factor = matmul({m, m, m, Transpose::kNo, Transpose::kNo}, gram, gram);
    for (std::size_t i = 0; i < factor.size(); ++i) factor[i] = b * gram[i] + c * factor[i];
    const Values more = matmul({m, n, m, Transpose::kNo, Transpose::kNo}, factor, x);
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = a * x[i] + more[i];
  }
  const auto rows = static_cast<double>(m), columns = static_cast<double>(n);
  const double scale = muon.scale == MuonScale::kMoonlight ? 0.2 * std::sqrt(std::max(rows, columns))
                                                           : std::sqrt(std::max(1.0, rows / columns));
  const double rate = static_cast<double>(muon.learning_rate);
  Values after(parameter.size());
  for (std::size_t i = 0; i < after.size(); ++i) {
    after[i] = parameter[i] * (1 - rate * static_cast<double>(muon.weight_decay)) - rate * scale * x[i];
  }
  return after;
}

}  // namespace terrace::trainer::oracle
