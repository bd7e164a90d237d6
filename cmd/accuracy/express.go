package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"plimsoll/internal/input/model"
	"plimsoll/internal/plan/job"
)

// unstatedSequence is the sequence length where a row gives none. Such rows have short texts, or figures that do not
// depend on the length.
const unstatedSequence = 128

// expression is the request for a row, or for the variant of the row that a figure measures.
type expression struct {
	row
	point   text // of the figure
	folder  string
	request job.Request
	model   *model.Model
}

// express writes the files that a user would have, and makes the request. Where the point names another recipe than
// the row, the point's recipe counts.
func express(r row, point, folder string) (*expression, error) {
	e := &expression{row: r.at(text(point)), point: text(point), folder: folder}
	if err := os.MkdirAll(folder, 0o755); err != nil || e.kernel() != nil {
		return e, err
	}
	for _, step := range []func() error{e.expressible, e.chooseModel, e.chooseMachine, e.choosePasses,
		e.choosePrecision, e.chooseOptimizer, e.chooseAdapter, e.chooseEngine, e.chooseTrainer} {
		if err := step(); err != nil {
			return nil, err
		}
	}
	return e, nil
}

func (e *expression) expressible() error {
	switch {
	case e.Model.Name == "":
		return errors.New("a kernel by itself, not the training of a model")
	case e.point.has("Gemini|NVMe offload"):
		return errors.New("ColossalAI's Gemini and its offload to NVMe are not planned")
	}
	return nil
}

// at returns the row with what the words of a point change: a figure may be of
// another length, batch, optimizer, attention or rank than its row.
func (r row) at(point text) row {
	set := func(n *number, pattern string) {
		if found := point.find(pattern); found != "" {
			*n = numberIn(found)
		}
	}
	set(&r.Sequence, `\b(?:seq(?:uence)?s?[ _-]?(?:len(?:gth)?s?)?|context(?:[ _-](?:len(?:gth)?|size|window))?|BT|T)`+
		`\s*(?:[=:@]|of|is)?\s*(\d[\d,_]*[km]?)\b`)
	set(&r.Sequence, `\b(\d[\d,_]*[km]?)[ -](?:tokens?|context|seq)`)
	set(&r.Sequence, `^\s*(\d+[km]|\d{1,3},\d{3}|\d{3,})\s*$`) // a number by itself
	set(&r.MicroBatch, `\b(?:micro[ _-]?batch|batch|mbs?|bs)(?:[ _-]?size)?\s*[=:]?\s*(\d+)\b`)
	set(&r.Accumulation, `\b(?:grad[ _-]?accum\w*|ga)\s*[=:]?\s*(\d+)\b`)
	if found := point.find(`\b((?:adamw?|sgd|adafactor|lomo|lion|muon|lamb|galore|apollo)\b.*|` +
		`(?:bnb|bitsandbytes|ao|torchao) [48]-?bit)`); found != "" {
		r.Optimizer = text(found)
	}
	if found := point.find(
		`\b(sdpa|flash_attention_2|flash[ -]attention|eager attention|attention eager)\b`); found != "" {
		r.Attention = text(strings.ReplaceAll(found, " ", "_"))
	}
	if a := r.Adapter; a != nil {
		changed := *a
		set(&changed.Rank, `\b(?:rank|r)\s*[=:]?\s*(\d+)\b`)
		if found := point.find(`\b(all[ -]linear|(?:[qkvo](?:_proj)?,\s*)+[qkvo](?:_proj)?)\b`); found != "" {
			changed.Targets = text(found)
		}
		r.Adapter = &changed
	}
	return r
}

// only reports whether a text of the row applies to this figure. A text with "last column" and the like applies only
// to figures whose point names it.
func (e *expression) only(t text, pattern string) bool {
	if e.point.has(`\bno (cpu )?` + pattern) {
		return false
	}
	return !t.has("column|row") || e.point.has(pattern)
}

// write writes one of the user's files.
func (e *expression) write(name string, content any) (string, error) {
	path := filepath.Join(e.folder, name)
	encoded, err := json.MarshalIndent(content, "", "  ")
	if err != nil {
		return "", err
	}
	return path, os.WriteFile(path, append(encoded, '\n'), 0o644)
}

// longestOfDrawn returns the length of the longest sample that a program meets again after it began with the longest of
// all. In samples whose lengths have an exponential tail, the longest of n grows with the logarithm of n.
func longestOfDrawn(longest, microBatch int) int {
	const samples, iterations = 50_000, 1000 // of Alpaca; "Time 1k iterations" in litgpt's resource tables
	return int(float64(longest) * math.Log(float64(iterations*microBatch)) / math.Log(samples))
}

// object is a JSON object.
type object = map[string]any

// chooseMachine chooses the GPUs, the versions and the batch size.
func (e *expression) chooseMachine() error {
	q := &e.request
	q.GPU = e.GPU.gpu()
	world := max(1, int(e.Parallel.World))
	if count, err := strconv.Atoi(e.GPU.find(`^(\d+)x`)); err == nil && world == 1 && slices.Contains(e.Tags, "multi") {
		world = count // some rows give the number only with the GPUs
	}
	if t := e.trainer(); t.ranks > 0 {
		world = t.ranks
	} else if t.shared && e.Accumulation == 0 && e.MicroBatch > 0 { // the program refuses more ranks
		world = min(world, max(1, t.batch/int(e.MicroBatch)))
	}
	perNode := int(e.Parallel.RanksPerHost)
	switch {
	case perNode > 0:
	case e.GPU.has(`\b1 per host`):
		perNode = 1
	default:
		perNode = min(world, 8)
	}
	q.GPUs, q.Nodes = perNode, max(1, world/perNode)
	if q.CPU = e.point.has(`\bCPU training`); q.CPU {
		q.GPU, q.GPUs = "", 0
	}
	q.TensorParallel, q.ContextParallel, q.ExpertParallel = int(e.Parallel.Tensor), int(e.Parallel.Context),
		int(e.Parallel.Expert)
	q.Sequence, q.MicroBatch, q.Accumulation = int(e.Sequence), max(1, int(e.MicroBatch)), max(1, int(e.Accumulation))
	if stages := int(e.Parallel.Pipeline); stages > 1 { // by default, torchtitan makes as many micro batches as stages
		q.PipelineParallel, q.PipelineSchedule = stages, cmp.Or(e.Parallel.Schedule, "1F1B")
		q.MicroBatch, q.Accumulation = max(1, q.MicroBatch/stages), stages
	}
	switch {
	case e.model != nil && e.model.Network != nil && e.model.Network.OnlyImages():
		q.Sequence = 0
	case q.Sequence == 0:
		q.Sequence = unstatedSequence
	}
	if e.trainer().longestFirst {
		q.UsualSequence = longestOfDrawn(q.Sequence, q.MicroBatch)
	}
	if t := e.trainer(); e.Accumulation == 0 && t.batch > 0 {
		batch := t.batch
		if t.shared {
			batch /= world
		}
		q.Accumulation = max(1, batch/q.MicroBatch)
	}
	q.Torch, q.Transformers, q.DeepSpeedVersion = e.Software.version("torch|pytorch", torchReleases),
		e.Software.version("transformers", transformersReleases), e.Software.version("deepspeed", nil)
	q.AccelerateVersion = e.Software.version("accelerate", nil)
	q.BitsAndBytes = cmp.Or(e.Software.version("bitsandbytes", nil), e.trainer().bitsAndBytes)
	q.Modules = strings.ToLower(e.Software.find("(litgpt|torchtitan)"))
	q.Allocator = e.trainer().allocator
	return nil
}

// recomputations derive what the backward pass recomputes from a text; the first match counts.
var recomputations = []struct{ pattern, name string }{
	{`^(off|no|none|false|disabled|without)\b|\b(is|are|was|were) off\b|not used`, "none"},
	{`every (2nd|second|other) layer`, "every-2"},
	{`selective|\bSAC\b`, "selective"},
	{`non[- ]?reentrant|use_reentrant ?= ?false`, "full"},
	{`reentrant`, "reentrant"},
	{`^(on|full|yes|true|enabled|block)\b|(gradient|activation)[ _-]checkpoint|recompute|per block|every (layer|block)`,
		"full"},
}

// choosePasses chooses how activations are held.
func (e *expression) choosePasses() error {
	q := &e.request
	switch {
	case e.Attention.has("eager"):
		q.Attention = "eager"
	case e.Attention.has(`^flash|flash_attention_2|\bfa-?[23]\b`):
		q.Attention = "flash"
	case e.Attention.has("sdpa|scaled_dot_product"):
		q.Attention = "sdpa"
	}
	for _, r := range recomputations {
		if e.Recompute.stated().has(r.pattern) {
			q.Recompute = r.name
			break
		}
	}
	if q.Recompute == "" && e.Recompute.stated() != "" {
		return fmt.Errorf("which activations are recomputed is not clear: %q", e.Recompute)
	}
	q.Compile = !e.point.has("eager") && (e.Notes.has(`torch\.compile( on|=True| \+)`) || e.point.has(`torch\.compile`))
	return nil
}

// precisions derive a precision from a text. The one counts that the text names first, outside brackets.
var precisions = []struct{ pattern, precision string }{
	{`(mixed|amp|autocast)[^,;/+]*?\b(bf16|bfloat16|fp8|float8)|\b(bf16|bfloat16|fp8)[ -]?(mixed|amp|autocast)`,
		"amp-bf16"},
	{`(mixed|amp|autocast)[^,;/+]*?\b(fp16|float16|half)|\b(fp16|float16)[ -]?(mixed|amp|autocast)|native GradScaler`,
		"amp-fp16"},
	{`fsdp2 mixed`, "amp-bf16"},
	{`\b(bf16|bfloat16|fp8|float8)`, "bf16"},
	{`\b(fp16|float16|half)`, "fp16"},
	{`\b(fp32|float32|tf32|(full|single)[- ]precision)`, "fp32"},
}

// precision returns the point's text where that names a precision, and otherwise the row's.
func (e *expression) precision() text {
	if e.point.has("mixed|-true|amp-") {
		return e.point
	}
	return e.Precision
}

// named returns the precision that the text names first.
func (t text) named() string {
	outside := text(regexp.MustCompile(`\([^)]*\)`).ReplaceAllString(string(t), ""))
	for _, t := range []text{outside, t} {
		at, precision := len(t), ""
		for _, p := range precisions {
			found := regexp.MustCompile("(?i)" + p.pattern).FindStringIndex(string(t))
			if found != nil && found[0] < at {
				at, precision = found[0], p.precision
			}
		}
		if precision != "" {
			return precision
		}
	}
	return ""
}

// quantized returns the kind of quantized weights that the text names, with -dq for quantized constants.
func (t text) quantized() string {
	for _, q := range []struct{ pattern, kind string }{
		{`\bgptq`, "gptq"}, {`\bawq`, "awq"}, {`\bfp4`, "fp4"}, {`nf4|\b4-?bit|\bint4`, "nf4"},
		{`int8|\b8-?bit`, "int8"},
	} {
		switch {
		case !t.has(q.pattern):
		case q.kind != "int8" && t.has("nf4-dq|fp4-dq|double"):
			return q.kind + "-dq"
		default:
			return q.kind
		}
	}
	return ""
}

func (e *expression) choosePrecision() error {
	e.request.Precision = e.precision().named()
	kind := e.precision().quantized()
	if e.Adapter != nil && kind == "" {
		kind = e.Adapter.Quant.quantized()
	}
	switch {
	case kind == "" && e.request.Precision == "" && e.precision().stated() != "":
		return fmt.Errorf("the precision %q is not known", e.precision())
	case kind == "":
		return nil
	case kind == "gptq" || kind == "awq":
		e.request.Quantization = kind
		return nil
	}
	kind, double, _ := strings.Cut(kind, "-")
	config := object{"load_in_4bit": kind != "int8", "load_in_8bit": kind == "int8", "bnb_4bit_quant_type": kind,
		"bnb_4bit_use_double_quant": double != "", "bnb_4bit_compute_dtype": "bfloat16"}
	if kind == "int8" {
		delete(config, "bnb_4bit_quant_type")
	}
	if e.Precision.has("storage|stored as bf16") || e.Parallel.FSDP != "" || e.stage() == 3 {
		config["bnb_4bit_quant_storage"] = "bfloat16" // sharded parameters must be of one type
	}
	if e.Software.has("litgpt") { // quantizes every linear module; transformers leaves the head out
		config["llm_int8_skip_modules"] = []string{}
	}
	var err error
	e.request.Quantization, err = e.write("quantization.json", config)
	return err
}

// optimizers derive an optimizer from a text; the first match counts.
var optimizers = []struct{ pattern, optimizer string }{
	{"4-?bit", "adamw-4bit"},
	{`lion.*8-?bit|8-?bit.*lion`, "lion-8bit"},
	{`paged.*8-?bit|8-?bit.*paged`, "paged_adamw_8bit"},
	{`galore`, "galore-adamw"},
	{`apollo`, "apollo-adamw"},
	{`ademamix.*8-?bit|8-?bit.*ademamix`, "ademamix-8bit"},
	{`ademamix`, "ademamix-32bit"},
	{`8-?bit`, "adamw_bnb_8bit"},
	{"adafactor", "adafactor"},
	{"lomo", "lomo"},
	{`\b(1|one)-?bit ?adam`, "onebitadam"},
	{`adam-?mini`, "adam-mini"},
	{`schedule[- _]?free.*sgd|sgd.*schedule[- _]?free`, "schedule-free-sgd"},
	{`schedule[- _]?free`, "schedule-free-adamw"},
	{`\bsgd\b.*(momentum|nesterov)`, "sgd-momentum"},
	{`\bsgd\b`, "sgd"},
	{`^bnb \(paged\)|^paged`, "paged_adamw_32bit"},
	{"adamw_hf", "adamw_hf"},
	{"fusedadam|adamw[, ]+fused|adamw_torch_fused", "adamw/fused"},
	{`\bmuon`, "muon"},
	{`\blion`, "lion"},
	{`\blamb`, "lamb"},
	{`adagrad`, "adagrad"},
	{`rmsprop`, "rmsprop"},
	{`adam(w|\b|[^a])`, "adamw"},
}

func (e *expression) chooseOptimizer() error {
	if e.Optimizer.has("when quantised") && e.request.Quantization != "" {
		e.request.Optimizer = "paged_adamw_32bit"
		return nil
	}
	for _, o := range optimizers {
		if e.Optimizer.has(o.pattern) {
			e.request.Optimizer = o.optimizer
			return nil
		}
	}
	if e.Optimizer.stated() != "" {
		return fmt.Errorf("the optimizer %q is not known", e.Optimizer)
	}
	return nil
}

// chooseAdapter writes adapter_config.json.
func (e *expression) chooseAdapter() error {
	a := e.Adapter
	if a == nil || e.point.has("full finetuning") {
		return nil
	}
	config := object{"task_type": "CAUSAL_LM"}
	switch {
	case a.Method.has("IA3"):
		config["peft_type"] = "IA3"
	case a.Method.has("VeRA"):
		config["peft_type"] = "VERA"
	case a.Method.has("LN"):
		config["peft_type"] = "LN_TUNING"
	case a.Method.has("AdaLoRA"):
		config["peft_type"], config["init_r"], config["target_r"] = "ADALORA", max(1, a.Rank), max(1, a.Rank)
		config["total_step"] = 1000
	case a.Method.has("OFT"):
		config["peft_type"] = "OFT"
	case !a.Method.has("LoRA|DoRA") && a.Method.stated() != "":
		return fmt.Errorf("the adapter %q is not planned", a.Method)
	default:
		config["peft_type"] = "LORA"
		config["use_dora"] = a.Method.has("DoRA")
		config["lora_dropout"] = e.trainer().dropout
	}
	if a.Rank > 0 {
		config["r"] = a.Rank
	}
	switch {
	case a.Targets == "" || a.Targets.has("default\\)$") && config["peft_type"] == "IA3":
	case a.Targets.has(`all[ -](linear|modules|layers)`):
		config["target_modules"] = "all-linear"
	default:
		targets := e.targets(a.Targets)
		if len(targets) == 0 {
			return fmt.Errorf("the targets %q of the adapter are not modules of %s", a.Targets, e.Model.Name)
		}
		config["target_modules"] = targets
	}
	var err error
	if e.request.Adapter, err = e.write("adapter_config.json", config); err != nil {
		return err
	}
	switch {
	case a.DType.has("fp32"):
		e.request.AdapterPrecision = "fp32"
	case e.precision().has("bf16-true") || e.Missing.has("adapter dtype bf16") || e.Parallel.FSDP.has("fsdp1") &&
		e.request.Precision == "bf16":
		e.request.AdapterPrecision = "bf16"
	}
	return nil
}

// targets returns the modules that words such as "q,v" mean in this model.
func (e *expression) targets(t text) []string {
	block := e.model.Network.Blocks()[0]
	first := func(paths ...string) []string {
		for _, path := range paths {
			if path != "" {
				return []string{path[strings.LastIndexByte(path, '.')+1:]}
			}
		}
		return nil
	}
	a, f := block.Attention, block.FeedForward
	if a.Fused != "" && e.Software.has("litgpt") { // whose adapters name the parts of a fused projection
		a.Query, a.Key, a.Value, a.Fused = "query", "key", "value", ""
	}
	gate, up, down := first(f.Gate, f.GateUp), first(f.Up, f.GateUp), first(f.Down)
	roles := []struct {
		pattern string
		modules []string
	}{
		{`\b(q|query|q_proj|wq|qkvo?|attention)\b`, first(a.Query, a.Fused)},
		{`\b(k|key|k_proj|wk|qkvo?|attention)\b`, first(a.Key, a.Fused)},
		{`\b(v|value|v_proj|wv|qkvo?|attention)\b`, first(a.Value, a.Fused)},
		{`\b(proj|o|output|o_proj|out_proj|wo|qkvo|attention)\b`, first(a.Output)},
		{`\b(gate|gate_proj|w1|mlp)\b`, gate}, {`\b(up|up_proj|w3|fc1|mlp)\b`, up},
		{`\b(down|down_proj|w2|fc2|mlp)\b`, down},
		{`\bhead\b`, first(e.model.Network.Head.Projection)},
	}
	var targets []string
	t, _, _ = cut(t, "(")
	for _, role := range roles {
		if t.has(role.pattern) {
			targets = append(targets, role.modules...)
		}
	}
	slices.Sort(targets)
	return slices.Compact(targets)
}

func cut(t text, separator string) (before, after text, found bool) {
	b, a, found := strings.Cut(string(t), separator)
	return text(b), text(a), found
}

// stage returns the ZeRO stage, or -1 without DeepSpeed. fp32 masters of half-precision weights imply DeepSpeed.
func (e *expression) stage() int {
	switch {
	case e.Parallel.Stage != nil && *e.Parallel.Stage > 0 && e.only(e.Parallel.Note, "zero"):
		return int(*e.Parallel.Stage)
	case e.Precision.has("fp32 master") && !e.Optimizer.has("lomo"):
		return 0
	}
	return -1
}

// offloads reports whether states rest on the host or on its disks, from where the step takes them.
func (e *expression) offloads() bool {
	t := e.Offload.stated()
	return t.has("offload|cpu|host|nvme") && !t.has(`^(no|none|off|false)\b|\bAPI\b`) && e.only(t, "offload")
}

// chooseEngine chooses the engine that shards.
func (e *expression) chooseEngine() error {
	q := &e.request
	stage := e.stage()
	if stage < 0 {
		offload := e.offloads() && !e.point.has("no cpu offload")
		sharding := e.Parallel.FSDP.stated()
		switch {
		case sharding.has(`no_shard|\bddp\b|^(no|none|off|false)\b`):
		case sharding.has(`hybrid|hsdp|grad_op`):
			return fmt.Errorf("FSDP's %q is not planned from words", sharding)
		case sharding.has(`fsdp ?2|fully_shard`), sharding.has("fsdp") && e.request.Modules == "torchtitan":
			q.FSDP, q.OffloadParameters = "2", offload
		case sharding.has(`fsdp|full[ _]shard`), sharding == "" && slices.Contains(e.Tags, "fsdp"):
			q.FSDP, q.OffloadParameters = "1", offload
		case sharding != "":
			return fmt.Errorf("the sharding %q is not known", sharding)
		}
		return nil
	}
	half := "bf16"
	switch q.Precision {
	case "fp16", "amp-fp16":
		half = "fp16"
	case "fp32":
		half = ""
	}
	zero := object{"stage": stage}
	config := object{"train_micro_batch_size_per_gpu": q.MicroBatch, "gradient_accumulation_steps": q.Accumulation,
		"zero_optimization": zero}
	if half != "" {
		settings := object{"enabled": true}
		if e.Precision.has("bf16 master") { // with weights in bf16 there is nothing for autocast to cast
			settings["bf16_master_weights_and_grads"], settings["bf16_optimizer_states"] = true, true
		}
		config[half] = settings
		q.Precision = ""
	}
	if q.Optimizer == "adamw" || q.Optimizer == "adamw/fused" {
		config["optimizer"] = object{"type": "AdamW", "params": object{"lr": 1e-5}}
		q.Optimizer = ""
	}
	if e.offloads() {
		device := object{"device": "cpu", "pin_memory": true}
		if e.Offload.has("nvme") {
			device["device"], device["nvme_path"] = "nvme", "/nvme"
		}
		zero["offload_optimizer"] = device
		if stage == 3 && e.Offload.has(`offload_param|param`) {
			zero["offload_param"] = device
		}
	}
	if n := e.Parallel.Bucket; n > 0 {
		zero["reduce_bucket_size"] = int64(n)
	}
	if n := e.Parallel.Persistence; n > 0 {
		zero["stage3_param_persistence_threshold"] = int64(n)
	}
	if e.Parallel.OverlapComm != nil {
		zero["overlap_comm"] = *e.Parallel.OverlapComm
	}
	var err error
	q.DeepSpeed, err = e.write("deepspeed.json", config)
	return err
}

// chooseTrainer writes TrainingArguments where transformers' Trainer ran.
func (e *expression) chooseTrainer() error {
	q := &e.request
	if !e.trainer().transformers || q.PipelineParallel > 1 && q.DeepSpeed != "" { // which the Trainer does not run
		return nil
	}
	arguments := object{"output_dir": "out", "per_device_train_batch_size": q.MicroBatch,
		"gradient_accumulation_steps": q.Accumulation, "gradient_checkpointing": q.Recompute != "none" &&
			q.Recompute != ""}
	if strings.Contains(q.Optimizer, "_") || q.Optimizer == "adafactor" || q.Optimizer == "sgd" {
		arguments["optim"] = q.Optimizer
		q.Optimizer = ""
	}
	q.Recompute = ""
	switch q.Precision {
	case "amp-fp16":
		arguments["fp16"] = true
	case "amp-bf16":
		arguments["bf16"] = true
	}
	var err error
	q.TrainingArgs, err = e.write("training_args.json", arguments)
	return err
}
