"""JAX with its default allocator: a static runtime that never passes a runtime-API hook."""

import jax
import jax.numpy as jnp

if jax.default_backend() != "gpu":
    print("this JAX sees no GPU")
    raise SystemExit(77)


def loss(weights, data):
    for weight in weights:
        data = jax.nn.gelu(data @ weight)
    return (data**2).mean()


keys = jax.random.split(jax.random.PRNGKey(0), 7)
weights = [jax.random.normal(key, (1024, 1024)) / 32 for key in keys[:6]]
data = jax.random.normal(keys[6], (2048, 1024))
update = jax.jit(lambda weights: jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights, data)))
for _ in range(4):
    weights = update(weights)
    print(float(loss(weights, data)).hex())
print(jnp.isfinite(weights[0]).all())
print("done")
