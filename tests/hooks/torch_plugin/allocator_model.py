"""A model of PyTorch's caching allocator, of the wall in front of it, and of a GPT that trains: in MiB, without tensors."""

from terrace.torch.allocator import Reading

MIB = 1 << 20
PAGE = 20  # of a segment that grows


class Block:
    """A piece of a segment: "used", "free", or "unmapped", in segments that grow."""

    def __init__(self, segment, size, state):
        self.segment, self.size, self.state = segment, size, state


class Segment:
    def __init__(self, size, grows, in_ddr=0):
        self.grows = grows
        self.in_ddr = in_ddr  # of its bytes
        self.blocks = [Block(self, size, "unmapped" if grows else "free")]


class CachingAllocator:
    """`limit` bytes of HBM. What does not fit is refused; PyTorch gives back what it can and asks again; then it lies in DDR."""

    def __init__(self, limit):
        self.limit, self.growing = limit, False
        self.segments, self.grown = [], None
        self.allocated = self.peak = self.reserved = self.ever = self.overflow = self.refusals = 0

    def read(self):
        return Reading(*(n * MIB for n in (self.allocated, self.peak, self.reserved, self.ever)))

    def is_short(self):
        self.growing = True
        return True

    def allocate(self, size):
        block = self._fitting(size)
        for turn in range(3):
            if block is not None:
                break
            block = self._new(size, in_ddr=turn == 2)
            if block is None:
                self.refusals += 1
                self.empty_cache()
        self._split(block, size, "used")
        self.allocated += size
        self.ever += size
        self.peak = max(self.peak, self.allocated)
        return block

    def free(self, block):
        block.state = "free"
        self.allocated -= block.size
        self._merge(block.segment)

    def empty_cache(self):
        for segment in list(self.segments):
            if segment.grows:
                for block in segment.blocks:
                    whole = block.size // PAGE * PAGE
                    if block.state == "free" and whole:
                        self._split(block, whole, "unmapped")
                        self._give(segment, whole)
                self._merge(segment)
            elif len(segment.blocks) == 1 and segment.blocks[0].state == "free":
                self.segments.remove(segment)
                self._give(segment, segment.blocks[0].size)

    def _give(self, segment, size):
        self.reserved -= size
        back = min(segment.in_ddr, size)
        segment.in_ddr -= back
        self.overflow -= back

    def _take(self, size, in_ddr):
        """Bytes of DDR among them; None: refused."""
        missing = max(0, self.reserved - self.overflow + size - self.limit)
        if missing and not in_ddr:
            return None
        self.reserved += size
        self.overflow += missing
        return missing

    def _fitting(self, size):
        free = [b for s in self.segments for b in s.blocks if b.state == "free" and b.size >= size]
        return min(free, key=lambda block: block.size, default=None)

    def _new(self, size, in_ddr):
        if self.growing:
            return self._grow(size, in_ddr)
        whole = -(-size // 2) * 2
        taken = self._take(whole, in_ddr)
        if taken is None:
            return None
        self.segments.append(Segment(whole, False, taken))
        return self.segments[-1].blocks[0]

    def _grow(self, size, in_ddr):
        if self.grown is None:
            self.grown = Segment(1 << 20, True)
            self.segments.append(self.grown)
        blocks = self.grown.blocks
        for index, block in enumerate(blocks):
            before = block.size if block.state == "free" else 0
            unmapped = blocks[index + 1] if before and index + 1 < len(blocks) else block
            if unmapped.state != "unmapped" or before + unmapped.size < size:
                continue
            more = min(unmapped.size, -(-(size - before) // PAGE) * PAGE)
            taken = self._take(more, in_ddr)
            if taken is None:
                return None
            self.grown.in_ddr += taken
            self._split(unmapped, more, "free")
            return self._merge(self.grown, containing=unmapped)
        raise AssertionError("the address space has an end")

    def _split(self, block, size, state):
        if block.size > size:
            blocks = block.segment.blocks
            blocks.insert(blocks.index(block) + 1, Block(block.segment, block.size - size, block.state))
            block.size = size
        block.state = state

    @staticmethod
    def _merge(segment, containing=None):
        merged = []
        for block in segment.blocks:
            last = merged[-1] if merged else None
            if last is not None and last.state == block.state != "used":
                last.size += block.size
                containing = last if containing is block else containing
            else:
                merged.append(block)
        segment.blocks[:] = merged
        return containing


class WallLease:
    """The lease behind that wall: `context` is the driver's."""

    def __init__(self, allocator, context):
        self.allocator, self.context = allocator, context
        self.asked = self.switched_off = False
        self.refresh()

    def limit(self):
        return (self.allocator.limit + self.context) * MIB

    def refresh(self):
        a = self.allocator
        self.used = (a.reserved - a.overflow + self.context) * MIB
        self.overflow, self.refusals = a.overflow * MIB, a.refusals


class Gpt:
    """One step after another: the tensors of gpt_checkpointed.py at a batch of 8 x 2048, by their sizes."""

    WIDE, HIDDEN, QKV, LOGITS = 512, 128, 384, 1000
    HEAD = 250

    def __init__(self, job, layers, states=True):
        self.job, self.layers, self.states = job, layers, states
        self.weights = [job.allocate(self.HEAD) for _ in range(2)]
        self.weights += [job.allocate(size) for _ in range(layers) for size in (96, 32, 128, 128)]
        self.moments = []

    def step(self):
        job, saved = self.job, []

        def op(size, *inputs):
            """An operator that saves its inputs, and gives one tensor."""
            saved.append([job.save(i) for i in inputs])
            return job.tensor(size)

        x = job.tensor(self.HIDDEN)
        for _ in range(self.layers):
            normed = op(self.HIDDEN, x)
            qkv = op(self.QKV, normed)
            y = op(self.HIDDEN, qkv)
            job.save_more(saved[-1], y)
            flat = op(self.HIDDEN)
            o = op(self.HIDDEN, flat)
            x = op(self.HIDDEN)
            del o, y, flat, normed, qkv
            normed = op(self.HIDDEN, x)
            up = op(self.WIDE, normed)
            wide = op(self.WIDE, up)
            down = op(self.HIDDEN, wide)
            x = op(self.HIDDEN)
            del down, normed, up, wide
        normed = op(self.HIDDEN, x)
        logits = op(self.LOGITS, normed)
        exact = op(2 * self.LOGITS)
        del logits, normed, x
        scores = op(2 * self.LOGITS)
        job.save_more(saved[-1], scores)
        del exact
        losses = [job.save(scores)]
        del scores
        self._update(self._backward(saved, losses))

    def _backward(self, saved, losses):
        job, gradients = self.job, []
        job.use(losses)
        grad = job.tensor(2 * self.LOGITS)
        job.done(losses)
        job.use(saved[-1])
        grad = job.tensor(2 * self.LOGITS)
        job.done(saved.pop())
        grad = job.tensor(self.LOGITS)
        saved.pop()
        sizes = {i: s for i, s in enumerate((96, 32, 128, 128))}
        job.use(saved[-1])
        grad = job.tensor(self.HIDDEN)
        gradients.append(job.allocate(self.HEAD))
        job.done(saved.pop())
        while saved:
            step = saved[-1]
            job.use(step)
            grad = job.tensor(max([self.HIDDEN] + [size for *_, size in step]))
            job.done(saved.pop())
            if len(saved) % 11 in (2, 5, 8, 10):
                gradients.append(job.allocate(sizes[len(gradients) % 4]))
        gradients.append(job.allocate(self.HEAD))
        del grad
        return gradients

    def _update(self, gradients):
        job = self.job
        job.begin_update()
        if self.states and not self.moments:
            self.moments = [job.allocate(w.size) for w in self.weights for _ in range(2)]
        for gradient in gradients:
            job.allocator.free(gradient)
        job.end_step()
