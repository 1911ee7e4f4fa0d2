#include "examples/moe_trainer/model/site.hpp"

namespace terrace::trainer {

SiteId declare_site(Session& session, const SiteName& name) {
  return session.declare({.name = "layer." + std::to_string(name.layer) + "." + name.group,
                          .kind = name.kind,
                          .layer = name.layer,
                          .group = name.group});
}

}  // namespace terrace::trainer
