package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// row is a training run that somebody measured and published.
type row struct {
	ID        string   `json:"id"`
	Tags      []string `json:"tags"`
	Source    string   `json:"source"`
	Software  text     `json:"software"`
	Model     sizes    `json:"model"`
	Precision text     `json:"precision"`
	Optimizer text     `json:"optimizer"`

	MicroBatch   number `json:"micro_batch"`
	Sequence     number `json:"seq_len"`
	Accumulation number `json:"grad_accum"`

	Recompute  text     `json:"act_ckpt"`
	Attention  text     `json:"attn"`
	Parallel   parallel `json:"parallel"`
	Offload    text     `json:"offload"`
	Adapter    *adapter `json:"peft"`
	GPU        text     `json:"gpu"`
	Measured   []figure `json:"measured"`
	Missing    text     `json:"missing"`
	Notes      text     `json:"notes"`
	Confidence string   `json:"confidence"`

	unread error // why the row could not be read
}

type sizes struct {
	Name       string `json:"hf_id"`
	Layers     number `json:"layers"`
	Hidden     number `json:"hidden"`
	Heads      number `json:"heads"`
	KeyHeads   number `json:"kv_heads"`
	Inner      number `json:"ffn"`
	Vocabulary number `json:"vocab"`
	HeadWidth  number `json:"head_dim"`
	Tied       *bool  `json:"tied_embeddings"`
	Elements   number `json:"total_params"`
	Experts    number `json:"experts"`
	Chosen     number `json:"top_k"`
	Note       text   `json:"note"`
}

type parallel struct {
	World        number  `json:"world"`
	Tensor       number  `json:"tp"`
	Pipeline     number  `json:"pp"`
	Context      number  `json:"cp"`
	Expert       number  `json:"ep"`
	RanksPerHost number  `json:"ranks_per_host"`
	Stage        *number `json:"zero_stage"`
	FSDP         text    `json:"fsdp"`
	Schedule     string  `json:"schedule"` // of the pipeline
	Bucket       number  `json:"reduce_bucket_size"`
	Persistence  number  `json:"persistence_threshold"`
	OverlapComm  *bool   `json:"overlap_comm"`
	Note         text    `json:"note"`
}

type adapter struct {
	Method  text   `json:"method"`
	Rank    number `json:"r"`
	Targets text   `json:"targets"`
	Quant   text   `json:"quant"`
	DType   text   `json:"adapter_dtype"`
}

// figure is one measured quantity.
type figure struct {
	Quantity string  `json:"quantity"`
	Point    string  `json:"point"`
	Value    float64 `json:"value"`
	Unit     string  `json:"unit"`
}

// bytes returns the figure in bytes. "GB" is decimal unless the unit is marked as binary: many programs print GiB and
// call them GB.
func (f figure) bytes() (float64, bool) {
	unit := strings.ToLower(f.Unit)
	if f.inHiddenSizes() {
		return f.Value, true
	}
	for _, u := range []struct {
		name  string
		bytes float64
	}{{"bytes/param", 0}, {"bytes", 1}, {"gib", 1 << 30}, {"mib", 1 << 20}, {"printed gb", 1 << 30}, {"gb", 1e9},
		{"mb", 1e6}, {"g", 1e9}} {
		if strings.Contains(unit, u.name) {
			return f.Value * u.bytes, u.bytes > 0
		}
	}
	return 0, false
}

// perParameter reports whether the unit is a byte for every parameter of the model.
func (f figure) perParameter() bool { return text(f.Unit).has("bytes/param") }

// inHiddenSizes reports whether the unit is the width of the residual stream, for
// every token and in the type that matmuls compute in.
func (f figure) inHiddenSizes() bool { return text(f.Unit).has("hidden size") }

// number is an integer, the first number in a text, or the last of a range. K is
// 1024.
type number int64

var (
	first = regexp.MustCompile(`(?i)(\d[\d,_]*)(k\b)?`)
	last  = regexp.MustCompile(`(?i)\d(?:k)?\s*(?:\.\.+|–|-|\bto\b)\s*(\d[\d,_]*)(k\b)?`)
)

// numberIn returns the number in a text, 0 without one.
func numberIn(s string) number {
	m := last.FindStringSubmatch(s)
	if m == nil {
		m = first.FindStringSubmatch(s)
	}
	if m == nil {
		return 0
	}
	n, _ := strconv.ParseInt(strings.NewReplacer(",", "", "_", "").Replace(m[1]), 10, 64)
	if m[2] != "" {
		n *= 1024
	}
	return number(n)
}

func (n *number) UnmarshalJSON(data []byte) error {
	if string(data) == "null" {
		return nil
	}
	var f float64
	if json.Unmarshal(data, &f) == nil {
		*n = number(f)
		return nil
	}
	*n = numberIn(string(data))
	return nil
}

// text is prose; null is empty.
type text string

func (t *text) UnmarshalJSON(data []byte) error {
	var s string
	if json.Unmarshal(data, &s) != nil {
		s = string(data)
	}
	if s == "null" {
		s = ""
	}
	*t = text(s)
	return nil
}

// has reports whether the text contains a word of the pattern, ignoring case.
func (t text) has(pattern string) bool {
	return regexp.MustCompile("(?i)" + pattern).MatchString(string(t))
}

// find returns the first group of the pattern.
func (t text) find(pattern string) string {
	if m := regexp.MustCompile("(?i)" + pattern).FindStringSubmatch(string(t)); m != nil {
		return m[1]
	}
	return ""
}

// readRows reads the rows to compare with plans. The recipe of such a row is well known (confidence A and B).
// Megatron-LM rows are left out, as Plimsoll does not plan Megatron-LM.
func readRows(file string) ([]row, error) {
	opened, err := os.Open(file)
	if err != nil {
		return nil, fmt.Errorf("the measurements cannot be read: %w", err)
	}
	defer opened.Close()
	var rows []row
	lines := bufio.NewScanner(opened)
	lines.Buffer(nil, 1<<24)
	for n := 1; lines.Scan(); n++ {
		var r row
		if err := json.Unmarshal(lines.Bytes(), &r); err != nil { // the other fields have been read
			r.unread = fmt.Errorf("%s:%d: %w", file, n, err)
		}
		if !slices.Contains(r.Tags, "megatron") && strings.ContainsAny(r.Confidence, "AB") {
			rows = append(rows, r)
		}
	}
	return rows, lines.Err()
}
