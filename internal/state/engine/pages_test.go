//go:build linux

package engine

import (
	"context"
	"os"
	"sync/atomic"
	"testing"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/machine/arena"
	"plimsoll/internal/machine/host"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
)

// TestPopulate: every arena has all its pages afterwards. The content of a shard does not
// change: zeros, and its journal.
func TestPopulate(t *testing.T) {
	for _, pages := range []arena.Pages{arena.BasePages, arena.TransparentHugePages} {
		c := crashCases()[3].with(cpus(t, 3), kernel.Generic)
		c.Layout, c.Pages = layout(c.Format, shard.DefaultChunk, shard.Uniform(c.Format, 3_000_001)), pages
		s, err := NewShard(c)
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		ended, end := context.WithCancel(t.Context())
		end()
		s.Populate(ended, func(size ledger.Bytes) { t.Errorf("%v are there, and nobody wanted them any more", size) })
		var told atomic.Int64
		s.Populate(t.Context(), func(size ledger.Bytes) { told.Add(int64(size)) })
		var mapped ledger.Bytes
		for i, plan := range c.Arenas() {
			a := s.Arenas()[i]
			resident, err := a.Resident()
			if err != nil {
				t.Fatal(err)
			}
			if plan.Component != ledger.StepJournal {
				mapped += a.Mapped()
			}
			if resident < a.Mapped() {
				t.Errorf("%v, %s: %v of %v are there", pages, plan.Component, resident, a.Mapped())
			}
		}
		if told.Load() != int64(mapped) {
			t.Errorf("%v: it told of %d bytes of %d", pages, told.Load(), mapped)
		}
		files := map[string]*os.File{}
		for _, a := range s.Arenas() {
			files[a.Name()] = a.File()
		}
		again, err := AttachShard(c, files)
		if err != nil {
			t.Errorf("its journal: %v", err)
		} else {
			again.Close()
		}
	}
}

// TestChoosePages chooses pages for hosts with different pools and settings.
func TestChoosePages(t *testing.T) {
	c := ShardConfig{Layout: layout(split, shard.DefaultChunk, shard.Uniform(split, 1<<20))}
	pool := []host.HugePagePool{{Size: 2 * ledger.MiB, Total: 100, Free: 100}}
	for name, test := range map[string]struct {
		has  host.HugePages
		want arena.Pages
	}{
		"nothing":    {host.HugePages{Shared: "never"}, arena.BasePages},
		"old kernel": {host.HugePages{}, arena.BasePages},
		"denied":     {host.HugePages{Shared: "deny", Transparent: "always"}, arena.BasePages},
		"joins":      {host.HugePages{Shared: "never", Joins: true}, arena.TransparentHugePages},
		"advise":     {host.HugePages{Shared: "advise"}, arena.TransparentHugePages},
		"pool":       {host.HugePages{Pools: pool, Joins: true}, arena.HugetlbPages},
		"pool is small": {host.HugePages{Pools: []host.HugePagePool{{Size: 2 * ledger.MiB, Total: 100, Free: 3}},
			Joins: true}, arena.TransparentHugePages},
		"other pool": {host.HugePages{Pools: []host.HugePagePool{{Size: ledger.GiB, Total: 100, Free: 100}}},
			arena.BasePages},
	} {
		if got := ChoosePages(&host.Host{HugePages: test.has}, c.Arenas()); got != test.want {
			t.Errorf("%s: %v, want %v", name, got, test.want)
		}
	}
}
