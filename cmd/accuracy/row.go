package main

import (
	"bufio"
	"cmp"
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

// quantities are other names of the quantities that figures have; the first match counts.
var quantities = []struct{ pattern, name string }{
	{`^(torch\.cuda\.)?(max|peak)[_ -]?(memory[_ -]?)?reserved([_ -]memory)?$|^reserved[_ -]peak$`, "max_reserved"},
	{`^(torch\.cuda\.)?(max|peak)[_ -]?(memory[_ -]?)?(allocated|active)([_ -]memory)?$|^(allocated|active)[_ -]peak$`,
		"max_allocated"},
	{`^nvidia[_ -]?smi|^(peak[_ -])?(vram|(gpu|device)[_ -]mem(ory)?)([_ -](used|usage|peak))?$`, "nvidia_smi"},
	{`^((cpu|host)[_ -])?(peak[_ -]|max[_ -])?rss$`, "cpu_rss"},
}

// UnmarshalJSON reads a figure. One whose value is no number is left with its reason, and the row's others count.
func (f *figure) UnmarshalJSON(data []byte) error {
	read := struct {
		Quantity, Point, Unit text
		Value                 any
	}{}
	if err := json.Unmarshal(data, &read); err != nil {
		return err
	}
	f.Quantity, f.Point, f.Unit = string(read.Quantity), string(read.Point), string(read.Unit)
	for _, q := range quantities {
		if read.Quantity.has(q.pattern) {
			f.Quantity = q.name
			break
		}
	}
	switch v := read.Value.(type) {
	case float64:
		f.Value = v
	case string:
		number := text(v).find(`^\W*(\d[\d,]*(?:\.\d+)?)`)
		f.Value, _ = strconv.ParseFloat(strings.ReplaceAll(number, ",", ""), 64)
	}
	return nil
}

// units are units of memory; the first match counts. "GB" is decimal unless the unit is marked as binary: many
// programs print GiB and call them GB.
var units = []struct {
	pattern string
	bytes   float64
}{{`bytes/param`, 0}, {`\b(tibs?|tebibytes?)\b`, 1 << 40}, {`\b(gibs?|gi|gibibytes?)\b|printed gb`, 1 << 30},
	{`\b(mibs?|mi|mebibytes?)\b`, 1 << 20}, {`\b(kibs?|kibibytes?)\b`, 1 << 10}, {`\b(tbs?|terabytes?)\b`, 1e12},
	{`\b(gbs?|g|gigabytes?)\b`, 1e9}, {`\b(mbs?|m|megabytes?)\b`, 1e6}, {`\b(kbs?|kilobytes?)\b`, 1e3},
	{`\b(bytes?|b)\b`, 1}}

// bytes returns the figure in bytes.
func (f figure) bytes() (float64, bool) {
	unit := text(f.Unit)
	if f.inHiddenSizes() {
		return f.Value, true
	}
	share := 1.0
	if m := ofWhole.FindStringSubmatch(f.Unit); m != nil {
		whole, err := strconv.ParseFloat(m[1], 64)
		if err != nil {
			return 0, false
		}
		share, unit = whole/100, text(m[2])
	}
	for _, u := range units {
		if unit.has(u.pattern) {
			return f.Value * share * u.bytes, u.bytes > 0
		}
	}
	return 0, false
}

// ofWhole is a share of the memory of a device.
var ofWhole = regexp.MustCompile(`^(?:%|percent) of (?:the )?(\d+(?:\.\d+)?) ?(\w+)`)

// perParameter reports whether the unit is a byte for every parameter of the model.
func (f figure) perParameter() bool { return text(f.Unit).has("bytes/param") }

// inHiddenSizes reports whether the unit is the width of the residual stream, for
// every token and in the type that matmuls compute in.
func (f figure) inHiddenSizes() bool { return text(f.Unit).has("hidden size") }

// number is an integer, the first number in a text, or the largest of a range or of a list. K is 1024, M is K K, and B
// is a billion.
type number int64

const (
	digits  = `\d+(?:[,_]\d{3})*`
	between = `\s*(?:\.\.+|…|–|-|,|/|\bto\b|\band\b|\bor\b)\s*(?:and |or )?`
)

var (
	first   = regexp.MustCompile(`(?i)(` + digits + `(?:\.\d+)?)(?:\s?([kmb])\b)?`)
	several = regexp.MustCompile(`(?i)` + digits + `(?:[km]\b)?(?:` + between + digits + `(?:[km]\b)?)+`)
)

// numberIn returns the number in a text, 0 without one.
func numberIn(s string) (largest number) {
	within := several.FindString(s)
	if within == "" {
		within = first.FindString(s)
	}
	for _, m := range first.FindAllStringSubmatch(within, -1) {
		n, _ := strconv.ParseFloat(strings.NewReplacer(",", "", "_", "").Replace(m[1]), 64)
		switch strings.ToLower(m[2]) {
		case "k":
			n *= 1 << 10
		case "m":
			n *= 1 << 20
		case "b":
			n *= 1e9
		}
		largest = max(largest, number(n))
	}
	return largest
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
	var list []number
	if json.Unmarshal(data, &list) == nil && len(list) > 0 {
		*n = slices.Max(list)
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

// stated returns the text, or nothing where it says that nothing is known.
func (t text) stated() text {
	if t.has(`^\W*(not (stated|given|known|specified)|un(stated|known|specified|clear)|n/?a|null|\?)\b|^\W*$`) {
		return ""
	}
	return t
}

// fromText reads an object of which a row has a text instead.
func fromText(data []byte) (text, bool) {
	var s string
	err := json.Unmarshal(data, &s)
	return text(s), err == nil
}

// UnmarshalJSON also reads the name of a model by itself.
func (m *sizes) UnmarshalJSON(data []byte) error {
	type plain sizes
	if name, ok := fromText(data); ok {
		*m = sizes{Name: string(name)}
		return nil
	}
	return json.Unmarshal(data, (*plain)(m))
}

// UnmarshalJSON also reads words such as "QLoRA r=16 on all linear layers, nf4".
func (a *adapter) UnmarshalJSON(data []byte) error {
	type plain adapter
	t, ok := fromText(data)
	if !ok {
		return json.Unmarshal(data, (*plain)(a))
	}
	*a = adapter{Method: t, Rank: numberIn(t.find(`\b(?:r|rank)\s*[=:]?\s*(\d+)`)), Quant: t}
	if t.has(`\b(all|attention|mlp)\b|_proj\b`) {
		a.Targets = t
	}
	return nil
}

// UnmarshalJSON also reads words such as "FSDP2 over 8 GPUs".
func (p *parallel) UnmarshalJSON(data []byte) error {
	type plain parallel
	t, ok := fromText(data)
	if !ok {
		return json.Unmarshal(data, (*plain)(p))
	}
	*p = parallel{World: numberIn(t.find(`\b(\d+) ?x? ?(?:GPUs?|ranks?|devices?)\b`))}
	if stage := t.find(`\bZeRO[- ]?(?:stage )?([0-3])\b`); stage != "" {
		n := numberIn(stage)
		p.Stage = &n
	} else {
		p.FSDP = text(t.find(`\b(FSDP ?[12]?|DDP)\b`))
	}
	return nil
}

// readRows reads the rows to compare with plans. The recipe of such a row is well known (confidence A and B). Runs of
// Megatron-LM are left out: planGolden reads them.
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
			r.ID, r.Confidence = cmp.Or(r.ID, fmt.Sprintf("line %d", n)), cmp.Or(r.Confidence, "A")
		}
		if !slices.Contains(r.Tags, "megatron") && strings.ContainsAny(r.Confidence, "AB") {
			rows = append(rows, r)
		}
	}
	return rows, lines.Err()
}
