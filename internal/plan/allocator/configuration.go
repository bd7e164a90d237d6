package allocator

import (
	"fmt"
	"math/bits"
	"slices"
	"strconv"
	"strings"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/version"
)

// Configuration holds the settings of PYTORCH_ALLOC_CONF or
// PYTORCH_CUDA_ALLOC_CONF that change bytes. The zero value is PyTorch's default.
type Configuration struct {
	// MallocAsync selects the driver's allocator instead of PyTorch's. CUDA does
	// not model it: there are no segments to count.
	MallocAsync bool

	Expandable bool // expandable_segments
	// MaxSplit is the size of the smallest oversize block. Oversize blocks are
	// never split, and serve oversize requests only. 0 means no block is.
	MaxSplit ledger.Bytes
	// MaxNonSplitRounding limits how much larger than its request an oversize
	// block may be. 0 means 20 MiB.
	MaxNonSplitRounding ledger.Bytes
	// LargeSegment is the segment size for requests above 1 MiB and below
	// 10 MiB, and the page size of expandable segments. 0 means 20 MiB.
	LargeSegment ledger.Bytes
	// Divisions holds the number of rounding steps between two powers of two,
	// by size: below 2 MiB, below 4 MiB, ... 32 GiB and above. 0 and 1 mean no
	// rounding.
	Divisions [16]ledger.Bytes
	// GarbageCollection is a share of the allowed memory. Above it, PyTorch
	// releases cached blocks by age. 0 means never; so does MemoryFraction 0.
	GarbageCollection float64
	// MemoryFraction is the share of the device that the process may reserve.
	// torch.cuda.set_per_process_memory_fraction sets it, too. 0 means all.
	MemoryFraction float64

	// PinnedHostRegister selects registered ordinary memory (anonymous pages) for
	// pinned blocks, instead of memory from the driver (shared pages).
	PinnedHostRegister bool
	// PinnedReserve is the size of a slab that serves pinned blocks while it lasts.
	PinnedReserve ledger.Bytes
	// PyTorch does not round pinned blocks above PinnedMaxRound to a power of
	// two, and does not cache pinned blocks above PinnedMaxCached. nil means no
	// limit.
	PinnedMaxRound, PinnedMaxCached *ledger.Bytes
}

const (
	minimumBlock        = 512
	smallLimit          = ledger.MiB      // requests up to this size come from the small pool
	smallSegment        = 2 * ledger.MiB  // segment size of the small pool
	ownSegment          = 10 * ledger.MiB // requests of at least this size get a segment of their own
	ownSegmentStep      = 2 * ledger.MiB  // whose size is a multiple of this
	defaultLargeSegment = 20 * ledger.MiB
)

// setting is a key of the configuration.
type setting struct {
	key   string
	since version.Version
	// read parses the value. It is nil if the key's effect is not modelled.
	read func(*parser, *Configuration) error
}

var settings = []setting{
	{"backend", version.Version{Major: 1, Minor: 12}, func(p *parser, c *Configuration) error {
		return p.word(map[string]bool{"native": false, "cudaMallocAsync": true}, &c.MallocAsync)
	}},
	{"max_split_size_mb", version.Version{Major: 1, Minor: 10}, func(p *parser, c *Configuration) error {
		return p.megabytes(p.leastOversize(c), &c.MaxSplit)
	}},
	{
		"roundup_power2_divisions",
		version.Version{Major: 1, Minor: 12},
		func(p *parser, c *Configuration) error { return p.divisions(&c.Divisions) },
	},
	{"garbage_collection_threshold", version.Version{Major: 1, Minor: 12}, func(p *parser, c *Configuration) error {
		return p.fraction(&c.GarbageCollection, "above 0 and below 1", func(f float64) bool { return f > 0 && f < 1 })
	}},
	{
		"expandable_segments",
		version.Version{Major: 2, Minor: 1},
		func(p *parser, c *Configuration) error { return p.boolean(&c.Expandable) },
	},
	{"release_lock_on_cudamalloc", version.Version{Major: 2, Minor: 1}, ignoredBoolean},
	{"release_lock_on_hipmalloc", version.Version{Major: 2, Minor: 1}, ignoredBoolean},
	{
		"pinned_use_cuda_host_register",
		version.Version{Major: 2, Minor: 1},
		func(p *parser, c *Configuration) error { return p.boolean(&c.PinnedHostRegister) },
	},
	{
		"pinned_use_hip_host_register",
		version.Version{Major: 2, Minor: 1},
		func(p *parser, c *Configuration) error { return p.boolean(&c.PinnedHostRegister) },
	},
	{"pinned_num_register_threads", version.Version{Major: 2, Minor: 1}, func(p *parser, _ *Configuration) error {
		_, err := p.integer("a power of two up to 128", func(n int64) bool { return n <= 128 && isPowerOfTwo(n) })
		return err
	}},
	{"pinned_use_background_threads", version.Version{Major: 2, Minor: 5}, ignoredBoolean},
	{"max_non_split_rounding_mb", version.Version{Major: 2, Minor: 7}, func(p *parser, c *Configuration) error {
		return p.megabytes(p.leastOversize(c), &c.MaxNonSplitRounding)
	}},
	{"graph_capture_record_stream_reuse", version.Version{Major: 2, Minor: 10}, ignoredBoolean},
	{"per_process_memory_fraction", version.Version{Major: 2, Minor: 10}, func(p *parser, c *Configuration) error {
		return p.fraction(&c.MemoryFraction, "above 0 and up to 1", func(f float64) bool { return f > 0 && f <= 1 })
	}},
	// A segment must hold the largest request that it serves.
	{"large_segment_size_mb", version.Version{Major: 2, Minor: 10}, func(p *parser, c *Configuration) error {
		return p.megabytes(int64(ownSegment/ledger.MiB), &c.LargeSegment)
	}},
	{
		"pinned_reserve_segment_size_mb",
		version.Version{Major: 2, Minor: 10},
		func(p *parser, c *Configuration) error { return p.megabytes(0, &c.PinnedReserve) },
	},
	{"throw_on_cudamalloc_oom", version.Version{Major: 2, Minor: 12}, ignoredBoolean},
	{"pinned_max_round_threshold_mb", version.Version{Major: 2, Minor: 13}, func(p *parser, c *Configuration) error {
		c.PinnedMaxRound = new(ledger.Bytes)
		return p.megabytes(0, c.PinnedMaxRound)
	}},
	{"pinned_max_cached_size_mb", version.Version{Major: 2, Minor: 13}, func(p *parser, c *Configuration) error {
		c.PinnedMaxCached = new(ledger.Bytes)
		return p.megabytes(0, c.PinnedMaxCached)
	}},
	{"pinned_free_catch_all", version.Version{Major: 2, Minor: 14}, ignoredBoolean},
	{"expandable_segments_reserve", version.Version{Major: 2, Minor: 14}, nil},
	{"expandable_segments_reserve_by_class", version.Version{Major: 2, Minor: 14}, nil},
}

func ignoredBoolean(p *parser, _ *Configuration) error { return p.boolean(new(bool)) }

// ParseConfiguration reads the value of PYTORCH_CUDA_ALLOC_CONF or
// PYTORCH_ALLOC_CONF as that version of PyTorch does. It refuses every value
// that PyTorch would refuse.
func ParseConfiguration(text string, v version.Version) (Configuration, error) {
	p := parser{tokens: tokens(text), version: v}
	var c Configuration
	for len(p.tokens) > 0 {
		if err := p.setting(&c); err != nil {
			return Configuration{}, err
		}
		if len(p.tokens) > 0 {
			if err := p.expect(","); err != nil {
				return Configuration{}, err
			}
		}
	}
	return c, nil
}

const separators = ",:[]"

// tokens splits a text at its separators. Separators are tokens, blanks are not.
func tokens(text string) []string {
	text = strings.ReplaceAll(text, " ", "")
	all := []string{}
	for text != "" {
		end := strings.IndexAny(text, separators)
		switch end {
		case -1:
			end = len(text)
		case 0:
			end = 1
		}
		all = append(all, text[:end])
		text = text[end:]
	}
	return all
}

type parser struct {
	tokens  []string // tokens that are left
	key     string   // key of the value that is being read
	version version.Version
}

func (p *parser) next() string {
	if len(p.tokens) == 0 {
		return ""
	}
	token := p.tokens[0]
	p.tokens = p.tokens[1:]
	return token
}

func (p *parser) peek() string {
	if len(p.tokens) == 0 {
		return ""
	}
	return p.tokens[0]
}

func (p *parser) setting(c *Configuration) error {
	p.key = p.next()
	i := slices.IndexFunc(settings, func(s setting) bool { return s.key == p.key })
	if i < 0 {
		hint := "the keys are in https://pytorch.org/docs/stable/notes/cuda.html"
		if variable, rest, given := strings.Cut(p.key, "="); given && strings.HasPrefix(variable, "PYTORCH") {
			hint = "leave out " + variable + "=, and begin with " + rest
		} else if nearest := fault.Nearest(p.key, p.knownKeys()); nearest != "" {
			hint = "did you mean " + nearest + "?"
		}
		return fault.Inputf("allocator configuration: %q is not a key of torch %s", p.key, p.version).WithHint(hint)
	}
	s := settings[i]
	if !p.version.AtLeast(s.since.Major, s.since.Minor, 0) {
		return fault.Inputf("allocator configuration: torch %s does not know %s, which exists since torch %s",
			p.version, p.key, s.since).WithHint("leave it out, or use a later torch")
	}
	if s.read == nil {
		return fault.Inputf("allocator configuration: the effect of %s is not modelled", p.key).
			WithHint("leave it out of the plan")
	}
	if err := p.expect(":"); err != nil {
		return err
	}
	return s.read(p, c)
}

func (p *parser) knownKeys() []string {
	keys := []string{}
	for _, s := range settings {
		if p.version.AtLeast(s.since.Major, s.since.Minor, 0) {
			keys = append(keys, s.key)
		}
	}
	return keys
}

// bad returns the error for a value of the current key.
func (p *parser) bad(found, expected string) error {
	if found == "" {
		found = "the end"
	} else {
		found = strconv.Quote(found)
	}
	return fault.Inputf("allocator configuration: %s: found %s, expected %s", p.key, found, expected)
}

func (p *parser) expect(separator string) error {
	if found := p.next(); found != separator {
		return p.bad(found, strconv.Quote(separator))
	}
	return nil
}

func (p *parser) word(meanings map[string]bool, into *bool) error {
	found := p.next()
	meaning, known := meanings[found]
	if !known {
		words := []string{}
		for word := range meanings {
			words = append(words, word)
		}
		slices.Sort(words)
		return p.bad(found, strings.Join(words, " or "))
	}
	*into = meaning
	return nil
}

func (p *parser) boolean(into *bool) error {
	return p.word(map[string]bool{"True": true, "False": false}, into)
}

func (p *parser) integer(expected string, valid func(int64) bool) (int64, error) {
	found := p.next()
	n, err := strconv.ParseInt(found, 10, 64)
	if err != nil || !valid(n) {
		return 0, p.bad(found, expected)
	}
	return n, nil
}

// most is the highest number of megabytes, one exbibyte. No device has as much.
const most = int64(limitless / ledger.MiB)

func (p *parser) megabytes(least int64, into *ledger.Bytes) error {
	n, err := p.integer(
		fmt.Sprintf("a whole number of MiB, at least %d", least),
		func(n int64) bool { return n >= least && n <= most },
	)
	*into = ledger.Bytes(n) * ledger.MiB
	return err
}

// leastOversize returns the lowest valid max_split_size_mb. Since torch 2.9 it may
// equal the size of a large segment. Before, it had to be larger.
func (p *parser) leastOversize(c *Configuration) int64 {
	least := int64(c.largeSegment() / ledger.MiB)
	if !p.version.AtLeast(2, 9, 0) {
		least++
	}
	return least
}

func (p *parser) fraction(into *float64, expected string, valid func(float64) bool) error {
	found := p.next()
	f, err := strconv.ParseFloat(found, 64)
	if err != nil || !valid(f) {
		return p.bad(found, "a number "+expected)
	}
	*into = f
	return nil
}

// divisions reads one number for all sizes, or a list such as [256:1,512:2,>:8]:
// divisions by lowest size in MiB. The first entry applies to smaller sizes, too;
// ">" applies from the last size on.
func (p *parser) divisions(into *[16]ledger.Bytes) error {
	if p.peek() != "[" {
		n, err := p.integer("a power of two or a list", isPowerOfTwo)
		for i := range into {
			into[i] = ledger.Bytes(n)
		}
		return err
	}
	if !p.version.AtLeast(2, 0, 0) {
		return p.bad("[", "a power of two (lists exist since torch 2.0)")
	}
	p.next()
	for first, last := true, 0; p.peek() != "]"; first = false {
		from, to := last, len(into)
		if p.peek() == ">" {
			p.next()
		} else {
			size, err := p.integer("a power of two, the size in MiB", isPowerOfTwo)
			if err != nil {
				return err
			}
			last = min(bits.Len64(uint64(size))-1, len(into)-1)
			from, to = last, last+1
			if first {
				from = 0
			}
		}
		if err := p.expect(":"); err != nil {
			return err
		}
		n, err := p.integer("0 or a power of two", func(n int64) bool { return n == 0 || isPowerOfTwo(n) })
		if err != nil {
			return err
		}
		for i := from; i < to; i++ {
			into[i] = ledger.Bytes(n)
		}
		if p.peek() != "]" {
			if err := p.expect(","); err != nil {
				return err
			}
		}
	}
	p.next()
	return nil
}

func isPowerOfTwo(n int64) bool { return n > 0 && n&(n-1) == 0 }

func (c *Configuration) largeSegment() ledger.Bytes {
	if c.LargeSegment == 0 {
		return defaultLargeSegment
	}
	return c.LargeSegment
}
