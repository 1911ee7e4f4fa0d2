// The gated delta rule step by step in float64, forward and backward.
#include <cmath>

#include "tests/trainer/oracle.hpp"

namespace terrace::trainer::oracle {
namespace {

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

// The runs of tokens that share a state: batch rows, or packed sequences.
struct Sequence {
  std::int64_t first, length;
};
std::vector<Sequence> sequences(const KdaShape& s, const KdaValues& in) {
  std::vector<Sequence> out;
  if (in.starts.empty()) {
    for (std::int64_t b = 0; b < s.batch; ++b) out.push_back({b * s.length, s.length});
  }
  for (std::size_t i = 0; i + 1 < in.starts.size(); ++i) {
    out.push_back({in.starts[i], in.starts[i + 1] - in.starts[i]});
  }
  return out;
}

// Where one step of one value head lies in the tensors.
struct Place {
  std::int64_t key, value, gate, beta;
};
Place place(const KdaShape& s, std::int64_t token, std::int64_t hv) {
  const std::int64_t h = hv / (s.value_heads / s.key_heads);
  return {(token * s.key_heads + h) * s.key_width, (token * s.value_heads + hv) * s.value_width,
          (token * s.value_heads + hv) * s.key_width, token * s.value_heads + hv};
}

struct Step {
  Values q, k, g;  // q and k of length one; g the log decay
  double q_inverse, k_inverse, beta;
};

double unit(const KdaShape& s, const Values& from, std::int64_t first, Values& out) {
  double squares = 0;
  for (std::int64_t d = 0; d < s.key_width; ++d) squares += from[at(first + d)] * from[at(first + d)];
  const double r = 1 / std::sqrt(squares + static_cast<double>(s.l2_eps));
  for (std::int64_t d = 0; d < s.key_width; ++d) out.push_back(from[at(first + d)] * r);
  return r;
}

Step step(const KdaShape& s, const KdaValues& in, const Place& p, std::int64_t hv) {
  Step now;
  now.q_inverse = unit(s, in.q, p.key, now.q);
  now.k_inverse = unit(s, in.k, p.key, now.k);
  now.beta = sigmoid(in.beta[at(p.beta)]);
  const double a = std::exp(in.a_log[at(hv)]);
  for (std::int64_t d = 0; d < s.key_width; ++d) {
    const double x = in.gate[at(p.gate + d)] + in.dt_bias[at(hv * s.key_width + d)];
    now.g.push_back(s.gate == KdaGate::kSoftplus ? -a * softplus(x)
                                                 : static_cast<double>(s.lower_bound) * sigmoid(a * x));
  }
  return now;
}

double scale_of(const KdaShape& s) {
  return s.scale != 0 ? static_cast<double>(s.scale) : 1 / std::sqrt(static_cast<double>(s.key_width));
}

// One step: decays the state, forms r = v - S^T k, adds b k r^T.
struct Moved {
  Values decayed, r, state;
};
Moved move(const KdaShape& s, const KdaValues& in, const Place& p, const Step& now, const Values& before) {
  Moved out{before, {}, {}};
  for (std::int64_t d = 0; d < s.key_width; ++d) {
    for (std::int64_t c = 0; c < s.value_width; ++c)
      out.decayed[at(d * s.value_width + c)] *= std::exp(now.g[at(d)]);
  }
  out.state = out.decayed;
  for (std::int64_t c = 0; c < s.value_width; ++c) {
    double r = in.v[at(p.value + c)];
    for (std::int64_t d = 0; d < s.key_width; ++d) r -= out.decayed[at(d * s.value_width + c)] * now.k[at(d)];
    out.r.push_back(r);
    for (std::int64_t d = 0; d < s.key_width; ++d)
      out.state[at(d * s.value_width + c)] += now.beta * now.k[at(d)] * r;
  }
  return out;
}

Values initial(const KdaShape& s, const Values& from, std::size_t sequence, std::int64_t hv) {
  const std::int64_t size = s.key_width * s.value_width,
                     first = (static_cast<std::int64_t>(sequence) * s.value_heads + hv) * size;
  if (from.empty()) return Values(at(size));
  return {from.begin() + first, from.begin() + first + size};
}

// Gradients of one step's own inputs, and dS turned into the gradient of the state before it.
void step_backward(const KdaShape& s, const Place& p, std::int64_t hv, const KdaValues& in, const Step& now,
                   const Moved& moved, const Values& d_o, Values& d_state, KdaGradients& out) {
  const std::int64_t K = s.key_width, V = s.value_width;
  const double scale = scale_of(s);
  Values d_q(at(K)), d_k(at(K)), d_r(at(V)), d_g(at(K));
  double d_beta = 0;
  for (std::int64_t d = 0; d < K; ++d) {
    for (std::int64_t c = 0; c < V; ++c) {
      const std::size_t dc = at(d * V + c);
      d_q[at(d)] += scale * moved.state[dc] * d_o[at(p.value + c)];
      d_state[dc] += scale * now.q[at(d)] * d_o[at(p.value + c)];
      d_r[at(c)] += now.beta * d_state[dc] * now.k[at(d)];
      d_beta += now.k[at(d)] * d_state[dc] * moved.r[at(c)];
    }
  }
  const double a = std::exp(in.a_log[at(hv)]);
  for (std::int64_t d = 0; d < K; ++d) {
    for (std::int64_t c = 0; c < V; ++c) {
      const std::size_t dc = at(d * V + c);
      d_k[at(d)] += now.beta * d_state[dc] * moved.r[at(c)] - moved.decayed[dc] * d_r[at(c)];
      d_state[dc] -= now.k[at(d)] * d_r[at(c)];
      d_g[at(d)] += d_state[dc] * moved.decayed[dc];
      d_state[dc] *= std::exp(now.g[at(d)]);
    }
    const double x = in.gate[at(p.gate + d)] + in.dt_bias[at(hv * K + d)];
    double d_z = 0;
    if (s.gate == KdaGate::kSoftplus) {
      d_z = -a * d_g[at(d)] * sigmoid(x);
      out.a_log[at(hv)] += d_g[at(d)] * now.g[at(d)];
    } else {
      const double y = sigmoid(a * x);
      d_z = d_g[at(d)] * static_cast<double>(s.lower_bound) * y * (1 - y) * a;
      out.a_log[at(hv)] += d_z * x;
    }
    out.gate[at(p.gate + d)] = d_z;
    out.dt_bias[at(hv * K + d)] += d_z;
  }
  for (std::int64_t c = 0; c < V; ++c) out.v[at(p.value + c)] = d_r[at(c)];
  out.beta[at(p.beta)] = d_beta * now.beta * (1 - now.beta);
  double q_along = 0, k_along = 0;
  for (std::int64_t d = 0; d < K; ++d) {
    q_along += now.q[at(d)] * d_q[at(d)];
    k_along += now.k[at(d)] * d_k[at(d)];
  }
  for (std::int64_t d = 0; d < K; ++d) {
    out.q[at(p.key + d)] += now.q_inverse * (d_q[at(d)] - now.q[at(d)] * q_along);
    out.k[at(p.key + d)] += now.k_inverse * (d_k[at(d)] - now.k[at(d)] * k_along);
  }
}

}  // namespace

KdaResult kda(const KdaShape& s, const KdaValues& in) {
  KdaResult out;
  out.o.resize(in.v.size());
  const std::vector<Sequence> all = sequences(s, in);
  for (std::size_t b = 0; b < all.size(); ++b) {
    for (std::int64_t hv = 0; hv < s.value_heads; ++hv) {
      Values state = initial(s, in.initial_state, b, hv);
      for (std::int64_t t = 0; t < all[b].length; ++t) {
        const Place p = place(s, all[b].first + t, hv);
        const Step now = step(s, in, p, hv);
        state = move(s, in, p, now, state).state;
        for (std::int64_t d = 0; d < s.key_width; ++d) {
          for (std::int64_t c = 0; c < s.value_width; ++c) {
            out.o[at(p.value + c)] += scale_of(s) * state[at(d * s.value_width + c)] * now.q[at(d)];
          }
        }
      }
      out.final_state.insert(out.final_state.end(), state.begin(), state.end());
    }
  }
  return out;
}

KdaGradients kda_backward(const KdaShape& s, const KdaValues& in, const Values& d_o,
                          const Values& d_final_state) {
  KdaGradients out;
  out.q.resize(in.q.size());
  out.k.resize(in.k.size());
  out.v.resize(in.v.size());
  out.gate.resize(in.gate.size());
  out.beta.resize(in.beta.size());
  out.a_log.resize(in.a_log.size());
  out.dt_bias.resize(in.dt_bias.size());
  const std::vector<Sequence> all = sequences(s, in);
  for (std::size_t b = 0; b < all.size(); ++b) {
    for (std::int64_t hv = 0; hv < s.value_heads; ++hv) {
      std::vector<Values> before{initial(s, in.initial_state, b, hv)};
      for (std::int64_t t = 0; t < all[b].length; ++t) {
        const Place p = place(s, all[b].first + t, hv);
        before.push_back(move(s, in, p, step(s, in, p, hv), before.back()).state);
      }
      Values d_state = initial(s, d_final_state, b, hv);
      for (std::int64_t t = all[b].length - 1; t >= 0; --t) {
        const Place p = place(s, all[b].first + t, hv);
        const Step now = step(s, in, p, hv);
        step_backward(s, p, hv, in, now, move(s, in, p, now, before[at(t)]), d_o, d_state, out);
      }
      out.initial_state.insert(out.initial_state.end(), d_state.begin(), d_state.end());
    }
  }
  return out;
}

}  // namespace terrace::trainer::oracle
