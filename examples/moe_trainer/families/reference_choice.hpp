// The tokens that the reference's library would look at.
//
// An indexer's scores are sums of rectified products, so exact zeros are common and the k-th best score is
// often one of several that are equal. Which of them are taken is a matter of rule: DsaSelect takes the
// earlier ones, PyTorch's topk on the CPU those that std::nth_element leaves in front. Both are right; a
// comparison number by number needs the same.
#pragma once

#include "examples/moe_trainer/model/pass.hpp"

namespace terrace::trainer {

class ReferenceChoice final : public TokenChooser {
 public:
  ReferenceChoice(Session& session, Memory& memory, Ops& ops)
      : session_(session), memory_(memory), ops_(ops) {}
  // Waits for the scores, which come to the host: for short sequences.
  void choose(const DsaSelect& select) const override;

 private:
  Session& session_;
  Memory& memory_;
  Ops& ops_;
};

}  // namespace terrace::trainer
