package evidence

import (
	"plimsoll/internal/base/lazyregexp"
	"plimsoll/internal/base/ledger"
)

// RayStore is the name of Ray's object store, a part of shared memory with a budget of its own.
const RayStore = "Ray's object store"

// poolPatterns are what programs say of a memory that has a budget of its own within that of the host.
var poolPatterns = []pattern{
	{ // Ray: src/ray/object_manager/plasma/store.cc, src/ray/common/memory_monitor*.cc
		name:       "Ray: the object store's account",
		literals:   []string{"Plasma store: ===", "Plasma store status:", "Object store memory usage: ["},
		expression: `=+ Plasma store: =+|\bPlasma store status:|\bObject store memory usage: \[`,
		kind:       TrainerLog,
		take:       func(r *reader, m *match) { r.begin(m.stream, &storeLines{at: m.text}) },
	},
	{ // Ray: python/ray/_private/internal_api.py, ray memory
		name:       "ray memory",
		literals:   []string{"Plasma memory usage "},
		expression: `^Plasma memory usage (?P<used>\d+) MiB, \d+ objects, (?P<full>[\d.]+)% full`,
		kind:       TrainerLog,
		fact: func(m *match) Fact {
			f := PoolUsage{By: RayStore, Used: m.size("used", ledger.MiB)}
			if full := m.size("full", 1000); full.Bytes > 0 { // a thousandth of a percent
				f.Size = Size{Bytes: ledger.Bytes(float64(f.Used.Bytes) * 1e5 / float64(full.Bytes)), Known: true}
			}
			return f
		},
	},
	{ // Ray: python/ray/autoscaler/_private/util.py, ray status
		name:       "ray status",
		literals:   []string{" object_store_memory"},
		expression: `^\s*(?P<used>[\d.]+[KMGT]?i?B)/(?P<size>[\d.]+[KMGT]?i?B) object_store_memory\b`,
		kind:       TrainerLog,
		fact: func(m *match) Fact {
			return PoolUsage{By: RayStore, Used: m.size("used", 1), Size: m.size("size", 1)}
		},
	},
}

// storeLines are the lines of the object store's account.
type storeLines struct {
	at   text
	fact PoolUsage
}

// storeLine is a line of the account. Ray counts with powers of ten there.
var storeLine = lazyregexp.New(`^(?:Current usage: ([\d.]+) / ([\d.]+) GB$|\(global lru\) capacity: (\d+)$|` +
	`(\d+) pending objects of total size (\d+)MB$|- bytes (created by worker|restored|received|errored): (\d+)$|` +
	`- (?:bytes|objects|num) [a-z ]+: \d+\]?$|\(global lru\) [a-z ]+: \d+%?\]?$|Eviction Stats:$|$)`)

// origins are how Ray calls where objects of the store come from, and what that means. Each object is of one of them.
var origins = map[string]string{"created by worker": "made by tasks and ray.put", "restored": "read back after a spill",
	"received": "copied from other nodes", "errored": "errors of tasks"}

func (b *storeLines) line(_ *reader, t *text) bool {
	groups := storeLine.FindStringSubmatch(t.string)
	if groups == nil {
		return false
	}
	const decimal = ledger.Bytes(1e9)
	switch {
	case groups[1] != "":
		b.fact.Used, b.fact.Size = sizeOf(groups[1], decimal), sizeOf(groups[2], decimal)
	case groups[3] != "":
		b.fact.Size = sizeOf(groups[3], 1)
	case groups[4] != "":
		b.fact.Waiting = sizeOf(groups[5], ledger.MiB)
	case groups[6] != "":
		if size := sizeOf(groups[7], 1); size.Bytes > 0 {
			b.fact.Parts = append(b.fact.Parts, MemoryHolder{Name: origins[groups[6]], Bytes: size.Bytes})
		}
	}
	return true
}

func (b *storeLines) end(r *reader) {
	if b.fact.Size.Known || len(b.fact.Parts) > 0 {
		b.fact.By = RayStore
		r.add(&b.at, b.fact)
	}
}
