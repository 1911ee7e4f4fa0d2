#include "tests/trainer/oracle_attention.hpp"

#include <algorithm>
#include <cmath>

namespace terrace::trainer::oracle {
namespace {

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

double scale_of(const AttentionShape& s) {
  return s.scale != 0 ? static_cast<double>(s.scale) : 1 / std::sqrt(static_cast<double>(s.key_width));
}

// The first position that position t of a batch row reads.
std::int64_t first_key(const AttentionShape& s, const AttentionValues& in, std::int64_t t) {
  std::int64_t first = 0;
  for (const std::int32_t start : in.starts) {
    if (start <= t) first = start;
  }
  return s.window > 0 ? std::max(first, t - s.window + 1) : first;
}

struct Row {
  std::int64_t first = 0;  // token, of the whole batch
  Values p;
  double lse = 0;
};
struct RowOf {
  std::int64_t token, head;
};
Row attend(const AttentionShape& s, const AttentionValues& in, const RowOf& of) {
  const std::int64_t batch = of.token / s.length * s.length;
  Row row{batch + first_key(s, in, of.token - batch), {}, 0};
  double top = in.sink.empty() ? -1e300 : in.sink[at(of.head)];
  for (std::int64_t key = row.first; key <= of.token; ++key) {
    double a = 0;
    for (std::int64_t c = 0; c < s.key_width; ++c) {
      a += in.q[at((of.token * s.heads + of.head) * s.key_width + c)] *
           in.k[at((key * s.key_heads + of.head / s.group()) * s.key_width + c)];
    }
    row.p.push_back(a * scale_of(s));
    top = std::max(top, row.p.back());
  }
  double total = in.sink.empty() ? 0 : std::exp(in.sink[at(of.head)] - top);
  for (const double a : row.p) total += std::exp(a - top);
  row.lse = top + std::log(total);
  for (double& a : row.p) a = std::exp(a - row.lse);
  return row;
}

void row_backward(const AttentionShape& s, const AttentionValues& in, const Values& d_o, const RowOf& of,
                  AttentionGradients& out) {
  const Row row = attend(s, in, of);
  const std::int64_t q = (of.token * s.heads + of.head) * s.key_width;
  const std::int64_t o = (of.token * s.heads + of.head) * s.value_width;
  Values d_p;
  double delta = 0;
  for (std::size_t j = 0; j < row.p.size(); ++j) {
    const std::int64_t v =
        ((row.first + static_cast<std::int64_t>(j)) * s.key_heads + of.head / s.group()) * s.value_width;
    double d = 0;
    for (std::int64_t c = 0; c < s.value_width; ++c) {
      d += d_o[at(o + c)] * in.v[at(v + c)];
      out.v[at(v + c)] += row.p[j] * d_o[at(o + c)];
    }
    d_p.push_back(d);
    delta += row.p[j] * d;
  }
  for (std::size_t j = 0; j < row.p.size(); ++j) {
    const std::int64_t k =
        ((row.first + static_cast<std::int64_t>(j)) * s.key_heads + of.head / s.group()) * s.key_width;
    const double d_a = row.p[j] * (d_p[j] - delta) * scale_of(s);
    for (std::int64_t c = 0; c < s.key_width; ++c) {
      out.q[at(q + c)] += d_a * in.k[at(k + c)];
      out.k[at(k + c)] += d_a * in.q[at(q + c)];
    }
  }
  if (!in.sink.empty()) out.sink[at(of.head)] -= std::exp(in.sink[at(of.head)] - row.lse) * delta;
}

}  // namespace

AttentionResult attention(const AttentionShape& s, const AttentionValues& in) {
  AttentionResult out;
  for (std::int64_t token = 0; token < s.batch * s.length; ++token) {
    for (std::int64_t head = 0; head < s.heads; ++head) {
      const Row row = attend(s, in, {token, head});
      out.lse.push_back(row.lse);
      Values o(at(s.value_width));
      for (std::size_t j = 0; j < row.p.size(); ++j) {
        const std::int64_t v =
            ((row.first + static_cast<std::int64_t>(j)) * s.key_heads + head / s.group()) * s.value_width;
        for (std::int64_t c = 0; c < s.value_width; ++c) o[at(c)] += row.p[j] * in.v[at(v + c)];
      }
      out.o.insert(out.o.end(), o.begin(), o.end());
    }
  }
  return out;
}

AttentionGradients attention_backward(const AttentionShape& s, const AttentionValues& in, const Values& d_o) {
  AttentionGradients out{Values(in.q.size()), Values(in.k.size()), Values(in.v.size()),
                         Values(in.sink.size())};
  for (std::int64_t token = 0; token < s.batch * s.length; ++token) {
    for (std::int64_t head = 0; head < s.heads; ++head) row_backward(s, in, d_o, {token, head}, out);
  }
  return out;
}

}  // namespace terrace::trainer::oracle
