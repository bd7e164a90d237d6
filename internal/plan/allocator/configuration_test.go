package allocator

import (
	"errors"
	"reflect"
	"strings"
	"testing"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/version"
)

func TestParseConfiguration(t *testing.T) {
	for text, want := range map[string]Configuration{
		"":  {},
		" ": {},
		"expandable_segments:True, max_split_size_mb: 128 ,": {
			Expandable: true, MaxSplit: 128 * mib,
		},
		"backend:cudaMallocAsync":                  {MallocAsync: true},
		"backend:native,expandable_segments:False": {},
		"garbage_collection_threshold:0.8,per_process_memory_fraction:0.5": {
			GarbageCollection: 0.8, MemoryFraction: 0.5,
		},
		"large_segment_size_mb:12,max_split_size_mb:12,max_non_split_rounding_mb:20": {
			LargeSegment: 12 * mib, MaxSplit: 12 * mib, MaxNonSplitRounding: 20 * mib,
		},
		"roundup_power2_divisions:4": {
			Divisions: [16]ledger.Bytes{4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4},
		},
		"roundup_power2_divisions:[256:1,512:2,1024:4,>:8]": {
			Divisions: [16]ledger.Bytes{1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 8, 8, 8, 8, 8, 8},
		},
		"roundup_power2_divisions:[2:2,8:4,65536:16],backend:native": {
			Divisions: [16]ledger.Bytes{2, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 16},
		},
		"roundup_power2_divisions:[]": {},
		"pinned_use_cuda_host_register:True,pinned_num_register_threads:8": {
			PinnedHostRegister: true,
		},
		"pinned_reserve_segment_size_mb:64,pinned_max_cached_size_mb:0": {
			PinnedReserve: 64 * mib, PinnedMaxCached: new(ledger.Bytes),
		},
		"pinned_max_round_threshold_mb:1,release_lock_on_cudamalloc:True": {
			PinnedMaxRound: new(mib),
		},
		"graph_capture_record_stream_reuse:True,throw_on_cudamalloc_oom:True":                   {},
		"pinned_use_background_threads:True,expandable_segments:True,expandable_segments:False": {},
	} {
		if got, err := ParseConfiguration(text, version.Version{Major: 2, Minor: 13}); err != nil ||
			!reflect.DeepEqual(got, want) {
			t.Errorf("%q is %+v, %v", text, got, err)
		}
	}
}

// TestBadConfiguration looks for what a user needs to correct the text.
func TestBadConfiguration(t *testing.T) {
	for _, test := range []struct {
		text  string
		minor int
		want  string // parts of the message
	}{
		{"expandable_segment:True", 13, `"expandable_segment" is not a key|did you mean expandable_segments?`},
		{"expandable_segments:true", 13, `expandable_segments: found "true", expected False or True`},
		{"expandable_segments", 13, `found the end, expected ":"`},
		{"expandable_segments:", 13, `found the end, expected False or True`},
		{"expandable_segments=True", 13, `is not a key|did you mean`},
		{"expandable_segments:True;backend:native", 13, `found "True;backend"`},
		{"large_segment_size_mb:12", 9, `torch 2.9 does not know large_segment_size_mb, which exists since torch 2.10`},
		{"pinned_max_round_threshold_mb:1", 12, `since torch 2.13`},
		{"max_split_size_mb:20", 8, `found "20", expected a whole number of MiB, at least 21`},
		{"max_split_size_mb:19", 9, `at least 20`},
		{"max_split_size_mb:128MB", 9, `found "128MB"`},
		{"max_split_size_mb:99999999999999999999", 9, `found "99999999999999999999"`},
		{"large_segment_size_mb:64,max_split_size_mb:32", 13, `at least 64`},
		{"large_segment_size_mb:8", 13, `at least 10`},
		{"garbage_collection_threshold:1", 13, `a number above 0 and below 1`},
		{"garbage_collection_threshold:NaN", 13, `a number above 0 and below 1`},
		{"per_process_memory_fraction:0", 13, `a number above 0 and up to 1`},
		{"backend:malloc", 13, `expected cudaMallocAsync or native`},
		{"pinned_num_register_threads:3", 13, `a power of two up to 128`},
		{"roundup_power2_divisions:3", 13, `a power of two or a list`},
		{"roundup_power2_divisions:[3:4]", 13, `found "3"`},
		{"roundup_power2_divisions:[4:3]", 13, `found "3", expected 0 or a power of two`},
		{"roundup_power2_divisions:[4:4", 13, `found the end, expected ","`},
		{"roundup_power2_divisions:[4]", 13, `found "]", expected ":"`},
		{"backend:native:", 13, `found ":", expected ","`},
		{"backend:native,,", 13, `"," is not a key`},
		{"backend:native backend:native", 13, `found "nativebackend"`},
		{"expandable_segments_reserve:0.5", 14, `not modelled`},
	} {
		_, err := ParseConfiguration(test.text, version.Version{Major: 2, Minor: test.minor})
		if !errors.As(err, new(*fault.Input)) {
			t.Errorf("%q: %v", test.text, err)
			continue
		}
		for _, part := range strings.Split(test.want, "|") {
			if !strings.Contains(err.Error(), part) {
				t.Errorf("%q: %v, want %q", test.text, err, part)
			}
		}
	}
	_, err := ParseConfiguration("roundup_power2_divisions:[4:4]", version.Version{Major: 1, Minor: 13})
	if err == nil || !strings.Contains(err.Error(), "lists exist since torch 2.0") {
		t.Error(err)
	}
}

// FuzzParseConfiguration replays a few requests under whatever was accepted.
func FuzzParseConfiguration(f *testing.F) {
	for _, s := range settings {
		for _, value := range []string{"True", "64", "0.5", "native", "[256:1,512:2,>:8]"} {
			f.Add(s.key+":"+value+",expandable_segments:False", "2.14", int64(3<<20))
		}
	}
	f.Fuzz(func(t *testing.T, text, torch string, size int64) {
		v, err := version.Parse(torch)
		if err != nil {
			return
		}
		configuration, err := ParseConfiguration(text, v)
		if err != nil {
			if !errors.As(err, new(*fault.Input)) {
				t.Fatal(err)
			}
			return
		}
		c, p := NewCUDA(configuration, 0), NewPinned(configuration, v)
		for i := range 4 {
			b, err := c.Allocate(ledger.Bytes(size), i%2)
			pinned, pinnedErr := p.Allocate(ledger.Bytes(size))
			for _, s := range []struct {
				err                  error
				requested, allocated ledger.Bytes
				reserved             ledger.Bytes
			}{
				{err, c.Statistics().Requested.Now, c.Statistics().Allocated.Now, c.Statistics().Reserved.Now},
				{pinnedErr, p.Statistics().Requested.Now, p.Statistics().Allocated.Now, p.Statistics().Pinned.Now},
			} {
				if s.err == nil && s.requested != ledger.Bytes(size) || s.requested > s.allocated ||
					s.allocated > s.reserved {
					t.Fatalf("%+v", s)
				}
			}
			if err := errors.Join(c.Free(b), p.Free(pinned)); err != nil {
				t.Fatal(err)
			}
		}
		c.EmptyCache()
		p.EmptyCache()
		if c.Statistics().Reserved.Now != 0 || p.Statistics().Pinned.Now > configuration.PinnedReserve {
			t.Fatalf("%+v, %+v", c.Statistics(), p.Statistics())
		}
	})
}
