// Package rollout is about engines that generate answers on the GPUs of a training: vLLM and SGLang. It reads how an
// engine is set up, and says what the engine holds of a GPU while it is awake and while it sleeps.
package rollout

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/ledger"
)

// The engines.
const (
	VLLM   = "vllm"
	SGLang = "sglang"
)

// Names are the engines that are known.
var Names = []string{VLLM, SGLang}

// Engine is an engine beside a training, with every setting decided.
type Engine struct {
	Name string
	// Fraction is gpu_memory_utilization of vLLM: the share of all memory of the GPU that the engine takes. With SGLang
	// it is mem_fraction_static: the share of what is free before the weights, for weights and KV cache.
	Fraction float64
	Tensor   int64 // GPUs that share a copy of the weights
	Server   bool  // the engine has GPUs of its own
	// SharesProcess means that the engine runs in the process of the trainer, and so in its CUDA context.
	SharesProcess bool

	// Sleep is the level that the engine sleeps at while the trainer works: 0 for none, 1 for weights that wait on the
	// host, 2 for weights that are dropped. FreesCache means that an engine without sleep frees the KV cache.
	Sleep      int
	FreesCache bool

	CacheType   dtype.Type // Invalid for that of the weights
	Graphs      bool       // CUDA graphs are captured
	Longest     int64      // max_model_len; 0 is not given
	Sequences   int64      // max_num_seqs at once
	BatchTokens int64      // max_num_batched_tokens or chunked_prefill_size

	// Backups says what of the trainer leaves the GPU while the engine is awake: for the host, but for what is dropped,
	// as other copies or the next step bring it.
	Backups, Dropped Backups
	// Earlier says that an earlier release of the program may run, which moves to the host what this one drops, and
	// whose loss takes more of the GPU.
	Earlier bool
	// LongestSample is what a sample may have of tokens where nothing bounds it but the engine: its context, or
	// NoContext where that is unknown. It is 0 where samples are as long as planned at most.
	LongestSample int64
	// SyncsFromGPU says that the trainer's parameters are on the GPU while the engine takes its weights.
	SyncsFromGPU bool
	// Copies is the number of further copies of the trainer's parameters on the host, such as that of the actor.
	Copies int64
	// Apart is the number of processes beside the trainer's on each of its GPUs that have other models, such as the
	// frozen one.
	Apart int64
	// HostReference means that the frozen model waits on the host between its passes.
	HostReference bool

	// Sync is how weights come to the engine: 0 for one parameter after the other, WholeModel, GatheredModel, or the
	// bytes of a bucket. SyncParts is the number of parts of a gathered model that come one after the other; 0 is 1.
	Sync      ledger.Bytes
	SyncParts int64
	// ChunkedLogProbs means that log-probabilities are made of some tokens at a time. LogProbsBatch is the number of
	// sequences of their passes; 0 for the micro batch of the update.
	ChunkedLogProbs bool
	LogProbsBatch   int64

	// RayThreshold is the share of the host's memory from which on Ray kills; 0 without Ray. ObjectStore is what Ray's
	// object store may take of it, or UsualObjectStore.
	RayThreshold float64
	ObjectStore  ledger.Bytes
}

// UsualObjectStore is the size of Ray's object store where nobody has set it.
const UsualObjectStore ledger.Bytes = -1

// ObjectStoreOf returns the size of Ray's object store on a host: without a size 30 % of its memory, at most 200 GB
// (DEFAULT_OBJECT_STORE_MEMORY_PROPORTION and DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES in ray/_private/ray_constants.py).
func (e *Engine) ObjectStoreOf(host ledger.Bytes) ledger.Bytes {
	const most = 200_000_000_000
	switch {
	case e.ObjectStore != UsualObjectStore:
		return e.ObjectStore
	case host == 0:
		return most
	}
	return min(most, host/10*3)
}

// NoContext is a LongestSample of a model whose context is unknown.
const NoContext int64 = -1

// WholeModel is the value of Sync for a copy of all weights, and GatheredModel for one where ranks shard them.
const (
	WholeModel    ledger.Bytes = -1
	GatheredModel ledger.Bytes = -2
)

// Backups says what a trainer moves to the host.
type Backups struct{ Parameters, Gradients, Optimizer bool }

// Any reports whether something goes.
func (b Backups) Any() bool { return b != Backups{} }

// All reports whether everything goes, as torch_memory_saver has it.
func (b Backups) All() bool { return b == Backups{true, true, true} }

// New returns an engine with the defaults of its program.
func New(name string) Engine {
	e := Engine{Name: name, Tensor: 1, Graphs: true, Sequences: 256, BatchTokens: 8192}
	if name == VLLM {
		e.Fraction = 0.92 // gpu_memory_utilization (vllm/config/cache.py)
	} else {
		e.Sync = 512 * ledger.MiB // update_weights_bucket_megabytes of verl, update_weight_buffer_size of slime
	}
	return e
}

// RayUsualThreshold is RAY_memory_usage_threshold where nobody has set it (ray/_private/ray_config_def.h).
const RayUsualThreshold = 0.95

// Parse reads the text of an engine: its name, its fraction of the GPU, and settings, such as vllm:0.5,sleep=1. A text
// without a name changes settings of the engine that files say, which is nil without one.
func Parse(text string, ofFiles *Engine) (*Engine, error) {
	words := strings.Split(text, ",")
	e, err := named(words[0], ofFiles)
	if err != nil {
		return nil, err
	}
	for i, word := range words {
		key, value, given := strings.Cut(word, "=")
		set, known := settings[key]
		switch {
		case i == 0 && !known: // the name
			continue
		case !known:
			return nil, fault.Inputf("settings of %s: %v", e.Label(), fault.Unknown(key, Settings()))
		}
		if err := set(e, value, given); err != nil {
			return nil, fault.Inputf("%s of %s: %v", key, e.Label(), err)
		}
	}
	return e, nil
}

// named returns the engine that the first word of a text names, with the defaults of its program.
func named(word string, ofFiles *Engine) (*Engine, error) {
	name, fraction, has := strings.Cut(word, ":")
	key, _, _ := strings.Cut(word, "=")
	if _, isSetting := settings[key]; isSetting && ofFiles != nil {
		e := *ofFiles
		return &e, nil
	}
	if !slices.Contains(Names, name) {
		return nil, fault.Inputf("the rollout engine is %q, expected %s", name, fault.OneOf(Names...)).
			WithHint("give the engine with its share of the GPU, such as vllm:0.5")
	}
	e := New(name)
	switch {
	case !has && e.Fraction > 0:
		return &e, nil
	case !has:
		return nil, fault.Inputf("%s has no fraction: SGLang picks one by the GPU", name).
			WithHint("give its mem_fraction_static, such as sglang:0.7")
	}
	if err := e.setFraction(fraction, true); err != nil {
		return nil, fault.Inputf("the fraction of %s: %v", name, err)
	}
	return &e, nil
}

func (e *Engine) setFraction(value string, _ bool) error {
	f, err := strconv.ParseFloat(value, 64)
	if err != nil || !(f > 0 && f <= 1) {
		return fmt.Errorf("found %q, expected a number above 0, up to 1", value)
	}
	e.Fraction = f
	return nil
}

// With returns a text with a setting in place of one of the same key.
func With(text, word string) string {
	key, _, _ := strings.Cut(word, "=")
	words := slices.DeleteFunc(strings.Split(text, ","), func(w string) bool {
		is, _, _ := strings.Cut(w, "=")
		return w == "" || is == key
	})
	return strings.Join(append(words, word), ",")
}

// setting sets a value of an engine, or says what was expected. Given is false for a key without a value.
type setting func(e *Engine, value string, given bool) error

// settings are the keys of an engine's text.
var settings = map[string]setting{
	"tp":                 counted(func(e *Engine) *int64 { return &e.Tensor }, 1),
	"max-model-len":      counted(func(e *Engine) *int64 { return &e.Longest }, 1),
	"max-num-seqs":       counted(func(e *Engine) *int64 { return &e.Sequences }, 1),
	"max-batched-tokens": counted(func(e *Engine) *int64 { return &e.BatchTokens }, 1),
	"log-probs-batch":    counted(func(e *Engine) *int64 { return &e.LogProbsBatch }, 1),
	"copies":             counted(func(e *Engine) *int64 { return &e.Copies }, 0),
	"sync-parts":         counted(func(e *Engine) *int64 { return &e.SyncParts }, 1),
	"fraction":           (*Engine).setFraction,
	"sleep":              (*Engine).setSleep,
	"server":             switched(func(e *Engine) *bool { return &e.Server }),
	"free-cache":         switched(func(e *Engine) *bool { return &e.FreesCache }),
	"graphs":             switched(func(e *Engine) *bool { return &e.Graphs }),
	"kv":                 (*Engine).setCacheType,
	"process":            chosen("own", "shared", func(e *Engine, shared bool) { e.SharesProcess = shared }),
	"log-probs":          chosen("whole", "chunked", func(e *Engine, chunked bool) { e.ChunkedLogProbs = chunked }),
	"reference":          chosen("gpu", "host", func(e *Engine, host bool) { e.HostReference = host }),
	"backups":            (*Engine).setBackups,
	"release":            chosen("any", "current", func(e *Engine, current bool) { e.Earlier = e.Earlier && !current }),
	"sync":               (*Engine).setSync,
	"ray":                (*Engine).setRay,
	"object-store":       (*Engine).setObjectStore,
}

// Settings returns the keys of an engine's text.
func Settings() []string {
	var keys []string
	for key := range settings {
		keys = append(keys, key)
	}
	slices.Sort(keys)
	return keys
}

// counted sets a whole number.
func counted(of func(*Engine) *int64, least int64) setting {
	return func(e *Engine, value string, _ bool) error {
		n, err := strconv.ParseInt(value, 10, 32)
		if err != nil || n < least {
			return fmt.Errorf("found %q, expected a whole number from %d on", value, least)
		}
		*of(e) = n
		return nil
	}
}

// switched sets what is on or off. A key alone is on.
func switched(of func(*Engine) *bool) setting {
	return func(e *Engine, value string, given bool) error {
		switch {
		case !given || value == "on":
			*of(e) = true
		case value == "off":
			*of(e) = false
		default:
			return fmt.Errorf("found %q, expected on or off", value)
		}
		return nil
	}
}

// chosen sets one of two values.
func chosen(no, yes string, set func(*Engine, bool)) setting {
	return func(e *Engine, value string, _ bool) error {
		if value != no && value != yes {
			return fmt.Errorf("found %q, expected %s or %s", value, no, yes)
		}
		set(e, value == yes)
		return nil
	}
}

func (e *Engine) setSleep(value string, given bool) error {
	if !given {
		value = "1"
	}
	if len(value) != 1 || value < "0" || value > "2" {
		return fmt.Errorf("found %q, expected 0 (no sleep), 1 (weights wait on the host) or 2 (weights are dropped)",
			value)
	}
	e.Sleep = int(value[0] - '0')
	return nil
}

// cacheTypes are the types of a KV cache. Auto is that of the weights.
var cacheTypes = map[string]dtype.Type{"auto": dtype.Invalid, "bf16": dtype.BF16, "fp16": dtype.F16,
	"fp8": dtype.F8E4M3}

func (e *Engine) setCacheType(value string, _ bool) error {
	t, known := cacheTypes[value]
	if !known {
		return fmt.Errorf("found %q, expected auto, bf16, fp16 or fp8", value)
	}
	e.CacheType = t
	return nil
}

func (e *Engine) setBackups(value string, given bool) error {
	if !given {
		value = "all"
	}
	parts := map[string]Backups{"all": {true, true, true}, "none": {}, "parameters": {Parameters: true},
		"gradients": {Gradients: true}, "optimizer": {Optimizer: true}}
	e.Backups, e.Dropped = Backups{}, Backups{}
	for what := range strings.SplitSeq(value, "+") {
		b, known := parts[what]
		if !known {
			return fmt.Errorf("found %q, expected all, none, or some of parameters+gradients+optimizer", what)
		}
		e.Backups.Parameters = e.Backups.Parameters || b.Parameters
		e.Backups.Gradients = e.Backups.Gradients || b.Gradients
		e.Backups.Optimizer = e.Backups.Optimizer || b.Optimizer
	}
	return nil
}

func (e *Engine) setSync(value string, _ bool) (err error) {
	switch value {
	case "tensor":
		e.Sync = 0
	case "full":
		e.Sync = WholeModel
	case "gathered":
		e.Sync = GatheredModel
	default:
		if e.Sync, err = ledger.ParseBytes(value); err != nil || e.Sync == 0 {
			return fmt.Errorf("found %q, expected tensor, full, gathered or the size of a bucket, such as 512MiB",
				value)
		}
	}
	return nil
}

func (e *Engine) setRay(value string, given bool) (err error) {
	e.RayThreshold = RayUsualThreshold
	if given {
		e.RayThreshold, err = strconv.ParseFloat(value, 64)
	}
	if err != nil || !(e.RayThreshold > 0 && e.RayThreshold <= 1) {
		return fmt.Errorf("found %q, expected RAY_memory_usage_threshold, such as 0.95", value)
	}
	return nil
}

func (e *Engine) setObjectStore(value string, given bool) (err error) {
	if !given {
		e.ObjectStore = UsualObjectStore
		return nil
	}
	e.ObjectStore, err = ledger.ParseBytes(value)
	return err
}

// String returns the words of the backups.
func (b Backups) String() string {
	if b.All() {
		return "all"
	}
	var words []string
	for _, part := range []struct {
		goes bool
		name string
	}{{b.Parameters, "parameters"}, {b.Gradients, "gradients"}, {b.Optimizer, "optimizer"}} {
		if part.goes {
			words = append(words, part.name)
		}
	}
	return strings.Join(words, "+")
}

// Label returns the engine's name as its authors write it.
func (e *Engine) Label() string {
	return map[string]string{VLLM: "vLLM", SGLang: "SGLang"}[e.Name]
}
