// Sparse attention and its indexer in float64.
#include <algorithm>
#include <cmath>
#include <limits>

#include "tests/trainer/oracle.hpp"

namespace terrace::trainer::oracle {
namespace {

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

double scale_of(const DsaShape& s) {
  return s.scale != 0 ? static_cast<double>(s.scale) : 1 / std::sqrt(static_cast<double>(s.key_width));
}
double index_scale(const DsaShape& s) {
  return 1 / std::sqrt(static_cast<double>(s.index_heads) * static_cast<double>(s.index_width));
}

double dot(const Values& a, std::int64_t a_at, const Values& b, std::int64_t b_at, std::int64_t n) {
  double sum = 0;
  for (std::int64_t i = 0; i < n; ++i) sum += a[at(a_at + i)] * b[at(b_at + i)];
  return sum;
}

// The chosen rows of a token, as positions in the whole tensor.
std::vector<std::int64_t> chosen(const DsaShape& s, const std::vector<std::int32_t>& selected,
                                 std::int64_t token) {
  std::vector<std::int64_t> rows;
  for (std::int64_t j = 0; j < s.slots(); ++j) {
    const std::int32_t position = selected[at(token * s.slots() + j)];
    if (position >= 0) rows.push_back(token / s.length * s.length + position);
  }
  return rows;
}

// Where the value of a row starts, and in which array: its own, or that of the keys.
struct ValueRow {
  const Values& in;
  std::int64_t at;
};
ValueRow value_row(const DsaShape& s, const DsaValues& in, std::int64_t row) {
  return in.v.empty() ? ValueRow{in.k, row * s.key_width} : ValueRow{in.v, row * s.value_width};
}

struct Attention {
  Values p, o;  // over the chosen, (DV)
  double p_sink = 0, lse = 0;
};
Attention attend(const DsaShape& s, const DsaValues& in, std::int64_t token, std::int64_t h,
                 const std::vector<std::int64_t>& rows) {
  Attention out{{}, Values(at(s.value_width))};
  double total = in.sink.empty() ? 0 : std::exp(in.sink[at(h)]);
  for (const std::int64_t row : rows) {
    const double a = dot(in.q, (token * s.heads + h) * s.key_width, in.k, row * s.key_width, s.key_width);
    out.p.push_back(std::exp(scale_of(s) * a));
    total += out.p.back();
  }
  out.lse = std::log(total);
  for (std::size_t j = 0; j < rows.size(); ++j) {
    out.p[j] /= total;
    const ValueRow value = value_row(s, in, rows[j]);
    for (std::int64_t c = 0; c < s.value_width; ++c) out.o[at(c)] += out.p[j] * value.in[at(value.at + c)];
  }
  if (!in.sink.empty() && !rows.empty()) out.p_sink = std::exp(in.sink[at(h)]) / total;
  return out;
}

double index_score(const DsaShape& s, const DsaValues& in, std::int64_t token, std::int64_t row) {
  double score = 0;
  for (std::int64_t h = 0; h < s.index_heads; ++h) {
    const double a = dot(in.index_q, (token * s.index_heads + h) * s.index_width, in.index_k,
                         row * s.index_width, s.index_width);
    score += in.index_w[at(token * s.index_heads + h)] * std::max(a, 0.0);
  }
  return score * index_scale(s);
}

struct Target {
  Values p, softmax;
  double loss = 0;
};
Target index_target(const DsaShape& s, const DsaValues& in, const DsaValues& from, std::int64_t token,
                    const std::vector<std::int64_t>& rows) {
  Target out{Values(rows.size()), {}, 0};
  double mass = 0, total = 0;
  for (std::int64_t h = 0; h < s.heads; ++h) {
    const Attention attention = attend(s, from, token, h, rows);
    for (std::size_t j = 0; j < rows.size(); ++j) out.p[j] += attention.p[j];
  }
  for (std::size_t j = 0; j < rows.size(); ++j) {
    mass += out.p[j];
    out.softmax.push_back(std::exp(index_score(s, in, token, rows[j])));
    total += out.softmax.back();
  }
  for (std::size_t j = 0; j < rows.size(); ++j) {
    out.p[j] /= mass;
    out.softmax[j] /= total;
    if (out.p[j] > 0) out.loss += out.p[j] * std::log(out.p[j] / out.softmax[j]);
  }
  return out;
}

void index_backward(const DsaShape& s, const DsaValues& in, std::int64_t token,
                    const std::vector<std::int64_t>& rows, double weight, DsaGradients& out) {
  const Target target = index_target(s, in, in, token, rows);
  out.index_loss += target.loss;
  for (std::size_t j = 0; j < rows.size(); ++j) {
    const double d_score = weight * (target.softmax[j] - target.p[j]) * index_scale(s);
    for (std::int64_t h = 0; h < s.index_heads; ++h) {
      const std::int64_t q = (token * s.index_heads + h) * s.index_width, k = rows[j] * s.index_width;
      const double a = dot(in.index_q, q, in.index_k, k, s.index_width);
      const std::size_t w = at(token * s.index_heads + h);
      out.index_w[w] += d_score * std::max(a, 0.0);
      if (a <= 0) continue;
      for (std::int64_t d = 0; d < s.index_width; ++d) {
        out.index_q[at(q + d)] += d_score * in.index_w[w] * in.index_k[at(k + d)];
        out.index_k[at(k + d)] += d_score * in.index_w[w] * in.index_q[at(q + d)];
      }
    }
  }
}

void head_backward(const DsaShape& s, const DsaValues& in, std::int64_t token, std::int64_t h,
                   const std::vector<std::int64_t>& rows, const Values& d_y, DsaGradients& out) {
  const Attention now = attend(s, in, token, h, rows);
  const std::int64_t y = (token * s.heads + h) * s.value_width, q = (token * s.heads + h) * s.key_width;
  Values d_o(at(s.value_width));
  for (std::int64_t c = 0; c < s.value_width; ++c) {
    const double open = in.gate.empty() ? 1 : sigmoid(in.gate[at(y + c)]);
    d_o[at(c)] = d_y[at(y + c)] * open;
    if (!in.gate.empty()) out.gate[at(y + c)] = d_y[at(y + c)] * now.o[at(c)] * open * (1 - open);
  }
  const double delta = dot(d_o, 0, now.o, 0, s.value_width);
  if (!in.sink.empty()) out.sink[at(h)] -= now.p_sink * delta;
  for (std::size_t j = 0; j < rows.size(); ++j) {
    const ValueRow value = value_row(s, in, rows[j]);
    const double d_p = dot(d_o, 0, value.in, value.at, s.value_width);
    const double d_a = now.p[j] * (d_p - delta) * scale_of(s);
    for (std::int64_t d = 0; d < s.key_width; ++d) {
      out.q[at(q + d)] += d_a * in.k[at(rows[j] * s.key_width + d)];
      out.k[at(rows[j] * s.key_width + d)] += d_a * in.q[at(q + d)];
    }
    Values& d_value = in.v.empty() ? out.k : out.v;
    for (std::int64_t c = 0; c < s.value_width; ++c) d_value[at(value.at + c)] += now.p[j] * d_o[at(c)];
  }
}

}  // namespace

Values dsa_scores(const DsaShape& s, const DsaValues& in) {
  Values scores(at(s.batch * s.length * s.length), -std::numeric_limits<double>::infinity());
  for (std::int64_t token = 0; token < s.batch * s.length; ++token) {
    std::int64_t from = 0;
    for (const std::int32_t start : in.starts) {
      if (start <= token % s.length) from = start;
    }
    for (std::int64_t p = from; p <= token % s.length; ++p) {
      scores[at(token * s.length + p)] = index_score(s, in, token, token / s.length * s.length + p);
    }
  }
  return scores;
}

std::vector<std::int32_t> dsa_select(const DsaShape& s, const Values& scores) {
  std::vector<std::int32_t> selected;
  for (std::int64_t token = 0; token < s.batch * s.length; ++token) {
    std::vector<std::int32_t> order;
    for (std::int64_t p = 0; p < s.length; ++p) {
      if (scores[at(token * s.length + p)] != -std::numeric_limits<double>::infinity())
        order.push_back(static_cast<std::int32_t>(p));
    }
    std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
      return scores[at(token * s.length + a)] > scores[at(token * s.length + b)];
    });
    if (static_cast<std::int64_t>(order.size()) > s.slots()) order.resize(at(s.slots()));
    std::sort(order.begin(), order.end());
    order.resize(at(s.slots()), -1);
    selected.insert(selected.end(), order.begin(), order.end());
  }
  return selected;
}

Values dsa(const DsaShape& s, const DsaValues& in, const std::vector<std::int32_t>& selected) {
  Values y;
  for (std::int64_t token = 0; token < s.batch * s.length; ++token) {
    const auto rows = chosen(s, selected, token);
    for (std::int64_t h = 0; h < s.heads; ++h) {
      const Values o = attend(s, in, token, h, rows).o;
      for (const double value : o) y.push_back(in.gate.empty() ? value : value * sigmoid(in.gate[y.size()]));
    }
  }
  return y;
}

DsaParts dsa_parts(const DsaShape& s, const DsaValues& in, const std::vector<std::int32_t>& selected) {
  DsaParts parts;
  for (std::int64_t token = 0; token < s.batch * s.length; ++token) {
    const auto rows = chosen(s, selected, token);
    for (std::int64_t h = 0; h < s.heads; ++h) {
      const Attention attention = attend(s, in, token, h, rows);
      parts.o.insert(parts.o.end(), attention.o.begin(), attention.o.end());
      parts.lse.push_back(attention.lse);
    }
  }
  return parts;
}

double dsa_index_loss(const DsaShape& s, const DsaValues& in, const std::vector<std::int32_t>& selected,
                      const DsaValues& target_from) {
  double loss = 0;
  for (std::int64_t token = 0; token < s.batch * s.length; ++token) {
    loss += index_target(s, in, target_from, token, chosen(s, selected, token)).loss;
  }
  return loss;
}

DsaGradients dsa_backward(const DsaShape& s, const DsaValues& in, const std::vector<std::int32_t>& selected,
                          const Values& d_y, double index_loss_weight) {
  DsaGradients out;
  out.q.resize(in.q.size());
  out.k.resize(in.k.size());
  out.v.resize(in.v.size());
  out.gate.resize(in.gate.size());
  out.sink.resize(in.sink.size());
  out.index_q.resize(in.index_q.size());
  out.index_k.resize(in.index_k.size());
  out.index_w.resize(in.index_w.size());
  for (std::int64_t token = 0; token < s.batch * s.length; ++token) {
    const auto rows = chosen(s, selected, token);
    for (std::int64_t h = 0; h < s.heads; ++h) head_backward(s, in, token, h, rows, d_y, out);
    index_backward(s, in, token, rows, index_loss_weight, out);
  }
  return out;
}

}  // namespace terrace::trainer::oracle
