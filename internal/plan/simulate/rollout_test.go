package simulate

import (
	"testing"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/rollout"
	"plimsoll/internal/plan/allocator"
)

// TestEvictAndRestore moves blocks off a device and back: ids stay theirs, and the memory is free for others meanwhile.
func TestEvictAndRestore(t *testing.T) {
	cache := &replayed{CUDA: allocator.NewCUDA(allocator.Configuration{}, 130*ledger.MiB)}
	gpu := newTrace(cache)
	why := because("a reason")
	stays := gpu.hold(int64(10*ledger.MiB), ledger.Activations, why)
	goes := gpu.hold(int64(80*ledger.MiB), ledger.Parameters, why)
	gone := gpu.hold(int64(2*ledger.MiB), ledger.Parameters, why)
	gone.free()
	ids, bytes := gpu.evict(func(c ledger.Component) bool { return c == ledger.Parameters })
	if len(ids) != 1 || ids[0] != goes.id || bytes != 80*ledger.MiB || gpu.live != 10*ledger.MiB {
		t.Fatalf("blocks %v of %v were evicted, and %v stay", ids, bytes, gpu.live)
	}
	other := gpu.hold(int64(110*ledger.MiB), ledger.RolloutCache, why)
	if gpu.failed != nil {
		t.Fatalf("the engine lacks memory that was evicted: %v", gpu.failed)
	}
	other.free()
	gpu.emptyCache()
	gpu.restore(ids)
	if gpu.failed != nil || gpu.live != 90*ledger.MiB {
		t.Fatalf("%v are there again, %v", gpu.live, gpu.failed)
	}
	goes.free()
	stays.free()
	if gpu.live != 0 || gpu.failed != nil {
		t.Errorf("%v are left, %v", gpu.live, gpu.failed)
	}
}

// TestWeightSync holds what a sync gathers at a time: of ranks that shard the weights all, a part, or a parameter.
func TestWeightSync(t *testing.T) {
	const all, largest = 1000, 300
	for _, c := range []struct {
		sync    ledger.Bytes
		parts   int64
		sharded bool
		want    int64
	}{
		{0, 0, true, largest}, {0, 0, false, 0}, {rollout.WholeModel, 0, false, all}, {64, 0, false, 64},
		{rollout.GatheredModel, 0, true, all}, {rollout.GatheredModel, 4, true, all / 4},
		{rollout.GatheredModel, 4, false, 0},
	} {
		e := &rolloutEngine{Engine: &rollout.Engine{Sync: c.sync, SyncParts: c.parts}}
		if is := e.bucket(all, largest, c.sharded); is != c.want {
			t.Errorf("sync %d in %d parts, sharded %t: %d, want %d", c.sync, c.parts, c.sharded, is, c.want)
		}
	}
}
