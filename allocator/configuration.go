package allocator

import (
	"fmt"
	"maps"
	"math/bits"
	"slices"
	"strconv"
	"strings"

	"plimsoll/fault"
	"plimsoll/ledger"
	"plimsoll/version"
)

// Configuration is what PYTORCH_CUDA_ALLOC_CONF (PYTORCH_ALLOC_CONF from torch
// 2.9 on) sets. The zero value is PyTorch's default.
type Configuration struct {
	Expandable       bool         // expandable_segments
	MaxSplit         ledger.Bytes // max_split_size_mb; 0 = no limit
	MaxNonSplitRound ledger.Bytes // max_non_split_rounding_mb; 0 = 20 MiB
	LargeSegment     ledger.Bytes // large_segment_size_mb; 0 = 20 MiB
	MemoryFraction   float64      // per_process_memory_fraction; 0 = all
	// divisions are the steps between powers of two that sizes are rounded up
	// to, by the magnitude of the size from 1 MiB on; 0 and 1 = none.
	divisions [16]int

	PinnedThreshold ledger.Bytes // pinned_max_round_threshold_mb; 0 = no limit
	PinnedCached    ledger.Bytes // pinned_max_cached_size_mb; 0 = no limit
	PinnedReserve   ledger.Bytes // pinned_reserve_segment_size_mb
	PinnedRegister  bool         // pinned_use_cuda_host_register
}

func (c *Configuration) largeSegment() ledger.Bytes {
	if c.LargeSegment > 0 {
		return c.LargeSegment
	}
	return largePage
}

func (c *Configuration) maxRounding() ledger.Bytes {
	if c.MaxNonSplitRound > 0 {
		return c.MaxNonSplitRound
	}
	return largePage
}

// round is the size of the block for a request (round_size).
func (c *Configuration) round(bytes ledger.Bytes) ledger.Bytes {
	if bytes < minBlock {
		return minBlock
	}
	magnitude := bits.Len64(uint64(bytes)) - 1
	d := ledger.Bytes(c.divisions[min(max(magnitude-20, 0), len(c.divisions)-1)])
	if d > 1 && bytes > minBlock*d {
		power := ledger.Bytes(1) << magnitude
		if bytes == power {
			return bytes
		}
		step := power / d
		return power + roundUp(bytes-power, step)
	}
	return roundUp(bytes, minBlock)
}

// setting is a key of the configuration.
type setting struct {
	since version.Version
	set   func(c *Configuration, value []string) error
}

// settings are the keys of torch 2.13. Those that change no sizes are accepted
// and have no effect.
var settings = map[string]setting{
	"backend": {version.Version{Major: 1, Minor: 12}, func(_ *Configuration, value []string) error {
		if len(value) == 1 && value[0] == "cudaMallocAsync" {
			return fmt.Errorf("cudaMallocAsync, which is CUDA's own allocator and not modelled")
		}
		if len(value) != 1 || value[0] != "native" {
			return fmt.Errorf("expected native")
		}
		return nil
	}},
	"expandable_segments": {version.Version{Major: 2, Minor: 1}, flag(func(c *Configuration, b bool) { c.Expandable = b })},
	"max_split_size_mb":   {version.Version{Major: 1, Minor: 10}, megabytes(21, func(c *Configuration, b ledger.Bytes) { c.MaxSplit = b })},
	"max_non_split_rounding_mb": {version.Version{Major: 2, Minor: 7}, megabytes(21, func(c *Configuration, b ledger.Bytes) {
		c.MaxNonSplitRound = b
	})},
	"large_segment_size_mb":             {version.Version{Major: 2, Minor: 10}, megabytes(2, func(c *Configuration, b ledger.Bytes) { c.LargeSegment = b })},
	"per_process_memory_fraction":       {version.Version{Major: 2, Minor: 10}, share(func(c *Configuration, f float64) { c.MemoryFraction = f })},
	"roundup_power2_divisions":          {version.Version{Major: 1, Minor: 12}, setDivisions},
	"garbage_collection_threshold":      {version.Version{Major: 1, Minor: 12}, share(func(*Configuration, float64) {})}, // acts near the limit only
	"release_lock_on_cudamalloc":        {version.Version{Major: 2, Minor: 1}, flag(func(*Configuration, bool) {})},
	"pinned_use_cuda_host_register":     {version.Version{Major: 2, Minor: 1}, flag(func(c *Configuration, b bool) { c.PinnedRegister = b })},
	"pinned_num_register_threads":       {version.Version{Major: 2, Minor: 1}, megabytes(1, func(*Configuration, ledger.Bytes) {})},
	"pinned_use_background_threads":     {version.Version{Major: 2, Minor: 5}, flag(func(*Configuration, bool) {})},
	"pinned_reserve_segment_size_mb":    {version.Version{Major: 2, Minor: 10}, megabytes(1, func(c *Configuration, b ledger.Bytes) { c.PinnedReserve = b })},
	"pinned_max_round_threshold_mb":     {version.Version{Major: 2, Minor: 13}, megabytes(1, func(c *Configuration, b ledger.Bytes) { c.PinnedThreshold = b })},
	"pinned_max_cached_size_mb":         {version.Version{Major: 2, Minor: 13}, megabytes(1, func(c *Configuration, b ledger.Bytes) { c.PinnedCached = b })},
	"graph_capture_record_stream_reuse": {version.Version{Major: 2, Minor: 9}, flag(func(*Configuration, bool) {})},
	"throw_on_cudamalloc_oom":           {version.Version{Major: 2, Minor: 12}, flag(func(*Configuration, bool) {})},
	"expandable_segments_reserve":       {version.Version{Major: 2, Minor: 13}, anything},
	"pinned_free_catch_all":             {version.Version{Major: 2, Minor: 13}, flag(func(*Configuration, bool) {})},
}

func anything(*Configuration, []string) error { return nil }

func flag(set func(*Configuration, bool)) func(*Configuration, []string) error {
	return func(c *Configuration, value []string) error {
		if len(value) != 1 || value[0] != "True" && value[0] != "False" {
			return fmt.Errorf("expected True or False")
		}
		set(c, value[0] == "True")
		return nil
	}
}

func megabytes(least int64, set func(*Configuration, ledger.Bytes)) func(*Configuration, []string) error {
	return func(c *Configuration, value []string) error {
		n, err := strconv.ParseInt(strings.Join(value, ""), 10, 40)
		if err != nil || n < least {
			return fmt.Errorf("expected a whole number from %d on", least)
		}
		set(c, ledger.Bytes(n)*ledger.MiB)
		return nil
	}
}

func share(set func(*Configuration, float64)) func(*Configuration, []string) error {
	return func(c *Configuration, value []string) error {
		f, err := strconv.ParseFloat(strings.Join(value, ""), 64)
		if err != nil || !(f > 0 && f <= 1) {
			return fmt.Errorf("expected a number above 0 and up to 1")
		}
		set(c, f)
		return nil
	}
}

// setDivisions reads 8, or [256:1,512:2,1024:4,>:8]: sizes in MiB and the
// number of steps from there on.
func setDivisions(c *Configuration, value []string) error {
	bad := fmt.Errorf("expected a power of two such as 8, or a list such as [256:1,512:2,>:8]")
	steps := func(text string) (int, bool) {
		n, err := strconv.Atoi(text)
		return n, err == nil && n >= 0 && n <= 1<<20 && (n == 0 || bits.OnesCount(uint(n)) == 1)
	}
	if len(value) == 1 {
		n, ok := steps(value[0])
		if !ok {
			return bad
		}
		for i := range c.divisions {
			c.divisions[i] = n
		}
		return nil
	}
	if len(value) < 5 || value[0] != "[" || value[len(value)-1] != "]" {
		return bad
	}
	at, first := 0, true
	for entry := range strings.SplitSeq(strings.Join(value[1:len(value)-1], ""), ",") {
		key, text, _ := strings.Cut(entry, ":")
		n, ok := steps(text)
		if !ok {
			return bad
		}
		if key == ">" {
			for ; at < len(c.divisions); at++ {
				c.divisions[at] = n
			}
			return nil
		}
		size, err := strconv.ParseUint(key, 10, 32)
		if err != nil || bits.OnesCount64(size) != 1 {
			return bad
		}
		at = min(bits.Len64(size)-1, len(c.divisions)-1)
		c.divisions[at] = n
		if first { // the first fills what is below, too
			for i := range at {
				c.divisions[i] = n
			}
			first = false
		}
		at++
	}
	return nil
}

// ParseConfiguration reads the text of the variable. Every error is a
// *fault.Input.
func ParseConfiguration(text string, torch version.Version) (Configuration, error) {
	var c Configuration
	tokens := tokenize(text)
	for i := 0; i < len(tokens); {
		key := tokens[i]
		s, known := settings[key]
		if !known {
			mend := "known are " + strings.Join(slices.Sorted(maps.Keys(settings)), ", ")
			if near := fault.Nearest(key, slices.Sorted(maps.Keys(settings))); near != "" {
				mend = fmt.Sprintf("did you mean %q?", near)
			}
			return c, &fault.Input{What: fmt.Sprintf("PyTorch's allocator knows no setting %q", key), Mend: mend}
		}
		if !torch.AtLeast(s.since.Major, s.since.Minor, 0) {
			return c, &fault.Input{What: fmt.Sprintf("PyTorch's allocator has %s from torch %d.%d on, and this is %v", key, s.since.Major, s.since.Minor, torch), Mend: "leave it out, or give another --torch"}
		}
		if i+1 >= len(tokens) || tokens[i+1] != ":" {
			return c, &fault.Input{What: fmt.Sprintf("%s has no value", key), Mend: "write " + key + ":VALUE, with a comma between settings"}
		}
		end := i + 2
		depth := 0
		for end < len(tokens) && (depth > 0 || tokens[end] != ",") {
			switch tokens[end] {
			case "[":
				depth++
			case "]":
				depth--
			}
			end++
		}
		if err := s.set(&c, tokens[i+2:end]); err != nil {
			return c, &fault.Input{What: fmt.Sprintf("%s is %q: %v", key, strings.Join(tokens[i+2:end], ""), err)}
		}
		i = end + 1
	}
	return c, nil
}

// tokenize splits at the marks of the grammar, which stay, and drops blanks.
func tokenize(text string) []string {
	var tokens []string
	start := -1
	for i, r := range text {
		if strings.ContainsRune(",:[] \t", r) {
			if start >= 0 {
				tokens = append(tokens, text[start:i])
				start = -1
			}
			if r != ' ' && r != '\t' {
				tokens = append(tokens, string(r))
			}
		} else if start < 0 {
			start = i
		}
	}
	if start >= 0 {
		tokens = append(tokens, text[start:])
	}
	return tokens
}
