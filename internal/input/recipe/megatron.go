package recipe

import (
	"bytes"
	"cmp"
	_ "embed"
	"errors"
	"io/fs"
	"maps"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/files"
	"plimsoll/internal/input/launcher"
	"plimsoll/internal/input/recipe/strict"
	"plimsoll/internal/input/shell"
)

// Megatron holds Megatron-LM's arguments that change memory. A number that is not given is 0 where Megatron-LM has
// None.
type Megatron struct {
	Given  string   // the arguments as they were typed, or their file
	Files  []string // that the arguments were read from
	Script string   // the name of the script, such as pretrain_gpt; empty if unknown
	Ranks  int64    // that the launcher starts; 0 if unknown
	// RanksPerNode are those that the launcher starts on each node.
	RanksPerNode int64

	Layers        int64   `key:"num_layers"`
	Hidden        int64   `key:"hidden_size"`
	FeedForward   int64   `key:"ffn_hidden_size"`
	Heads         int64   `key:"num_attention_heads"`
	HeadSize      int64   `key:"kv_channels"`
	GroupedQuery  bool    `key:"group_query_attention"`
	QueryGroups   int64   `key:"num_query_groups"`
	Sequence      int64   `key:"seq_length"`
	Positions     int64   `key:"max_position_embeddings"`
	PositionType  string  `key:"position_embedding_type"`
	Rotary        bool    `key:"use_rotary_position_embeddings"`
	NoPositions   bool    `key:"no_position_embedding"`
	Attention     string  `key:"attention_backend"`
	Flash         bool    `key:"use_flash_attn"`
	Implement     string  `key:"transformer_impl"`
	Deterministic bool    `key:"deterministic_mode"`
	AttentionDrop float64 `key:"attention_dropout"`
	HiddenDrop    float64 `key:"hidden_dropout"`
	SwiGLU        bool    `key:"swiglu"`
	QuickGeGLU    bool    `key:"quick_geglu"`
	SquaredReLU   bool    `key:"squared_relu"`
	Normalization string  `key:"normalization"`
	NoBias        bool    `key:"disable_bias_linear"`
	QKVBias       bool    `key:"add_qkv_bias"`
	Untied        bool    `key:"untie_embeddings_and_output_weights"`
	QKNorm        bool    `key:"qk_layernorm"`

	EncoderDecoder `key:""`
	NoBinaryHead   bool `key:"bert_no_binary_head"`

	VocabularySize  int64  `key:"vocab_size"`
	FileTokens      int64  // in the file of --vocab-file, if this host has it
	TokenizerType   string `key:"tokenizer_type"`
	TokenizerModel  string `key:"tokenizer_model"`
	ExtraIDs        int64  `key:"vocab_extra_ids"`
	VocabularyUnits int64  `key:"make_vocab_size_divisible_by"`
	Padded          int64  `key:"padded_vocab_size"`
	Unpadded        bool   `key:"no_pad_vocab_size"`

	MicroBatch  int64 `key:"micro_batch_size"`
	GlobalBatch int64 `key:"global_batch_size"`

	Tensor        int64  `key:"tensor_model_parallel_size"`
	Pipeline      int64  `key:"pipeline_model_parallel_size"`
	VirtualLayers int64  `key:"num_layers_per_virtual_pipeline_stage"`
	VirtualStages int64  `key:"num_virtual_stages_per_pipeline_rank"`
	VirtualGroup  int64  `key:"microbatch_group_size_per_virtual_pipeline_stage"`
	FirstLayers   int64  `key:"decoder_first_pipeline_num_layers"`
	LastLayers    int64  `key:"decoder_last_pipeline_num_layers"`
	Layout        string `key:"pipeline_model_parallel_layout"`
	CountsEmbed   bool   `key:"account_for_embedding_in_pipeline_split"`
	CountsLoss    bool   `key:"account_for_loss_in_pipeline_split"`
	Context       int64  `key:"context_parallel_size"`
	Expert        int64  `key:"expert_model_parallel_size"`
	ExpertTensor  int64  `key:"expert_tensor_parallel_size"`
	SequenceSplit bool   `key:"sequence_parallel"`

	BF16 bool `key:"bf16"`
	FP16 bool `key:"fp16"`

	MegatronFP8 `key:""`

	Optimizer         string  `key:"optimizer"`
	Distributed       bool    `key:"use_distributed_optimizer"`
	Instances         int64   `key:"num_distributed_optimizer_instances"`
	OverlapGradients  bool    `key:"overlap_grad_reduce"`
	OverlapParams     bool    `key:"overlap_param_gather"`
	BucketSize        int64   `key:"ddp_bucket_size"`
	Buckets           int64   `key:"ddp_num_buckets"`
	WideBuckets       bool    `key:"ddp_pad_buckets_for_high_nccl_busbw"`
	Accumulate32      bool    `key:"accumulate_allreduce_grads_in_fp32"`
	Reduce16          bool    `key:"grad_reduce_in_bf16"`
	PrecisionAware    bool    `key:"use_precision_aware_optimizer"`
	MainGradients     string  `key:"main_grads_dtype"`
	MainParams        string  `key:"main_params_dtype"`
	ExpAvg            string  `key:"exp_avg_dtype"`
	ExpAvgSq          string  `key:"exp_avg_sq_dtype"`
	CPUOffload        bool    `key:"optimizer_cpu_offload"`
	OffloadFraction   float64 `key:"optimizer_offload_fraction"`
	OffloadStates     bool    `key:"offload_optimizer_states"`
	NoPinnedGradients bool    `key:"no_pin_cpu_grads"`
	NoPinnedParams    bool    `key:"no_pin_cpu_params"`
	ChunkedOffload    bool    `key:"chunked_optimizer_state_offload"`
	ChunkMegabytes    int64   `key:"optimizer_state_offload_chunk_size_mb"`
	ChunkFraction     float64 `key:"optimizer_state_offload_fraction"`

	Recompute           string   `key:"recompute_granularity"`
	RecomputeMethod     string   `key:"recompute_method"`
	RecomputeLayers     int64    `key:"recompute_num_layers"`
	RecomputeModules    []string `key:"recompute_modules"`
	RecomputesAttention bool     `key:"recompute_activations"`
	RecomputesMixture   bool     `key:"moe_layer_recompute"`
	FusesLoss           bool     `key:"cross_entropy_loss_fusion"`
	LossFusion          string   `key:"cross_entropy_fusion_impl"`
	CUDAGraph           string   `key:"cuda_graph_impl"`
	NoBiasSwiGLU        bool     `key:"no_bias_swiglu_fusion"`
	NoMask              bool     `key:"no_create_attention_mask_in_dataloader"`
	MasksDocuments      bool     `key:"dataloader_inter_document_masking"`

	Experts         int64   `key:"num_experts"`
	ExpertHidden    int64   `key:"moe_ffn_hidden_size"`
	TopK            int64   `key:"moe_router_topk"`
	GroupedGEMM     bool    `key:"moe_grouped_gemm"`
	Dispatcher      string  `key:"moe_token_dispatcher_type"`
	SharedExpert    int64   `key:"moe_shared_expert_intermediate_size"`
	LayerFrequency  string  `key:"moe_layer_freq"`
	Capacity        float64 `key:"moe_expert_capacity_factor"`
	PadsToCapacity  bool    `key:"moe_pad_expert_input_to_capacity"`
	SharedGate      bool    `key:"moe_shared_expert_gate"`
	LatentAttention bool    `key:"multi_latent_attention"`
	QueryRank       int64   `key:"q_lora_rank"`
	KeyRank         int64   `key:"kv_lora_rank"`
	LatentHead      int64   `key:"qk_head_dim"`
	LatentPosition  int64   `key:"qk_pos_emb_head_dim"`
	LatentValue     int64   `key:"v_head_dim"`
	Predictions     int64   `key:"mtp_num_layers"`

	Saving MegatronSaving `key:""`

	Notes []Note
	scripted
	given *strict.Reader
}

// scripted is what a script says beside the arguments.
type scripted struct {
	// UnknownRanks are the numbers of ranks and nodes that the launcher gets from where it runs.
	UnknownRanks []Count
	// Environment are the variables that change what the training holds.
	Environment []Variable
	// Unset are variables that conditions of the script ask for and the script does not set. Looped are those that its
	// loops and cases set, which are left out.
	Unset, Looped []string
	Reference     bool         // a second model is held without gradients, as DPO has it
	Pairs         bool         // a sequence of a micro batch is two: what was chosen, and what was not
	Policy        *Policy      // of a program that trains on generated answers, nil for others
	Adapter       *CoreAdapter // nil for a training of all parameters
	// Missing are files that the script runs as a part of itself and that are not here.
	Missing []string
}

// EncoderDecoder is the form of a T5.
type EncoderDecoder struct {
	EncoderLayers   int64 `key:"encoder_num_layers"`
	DecoderLayers   int64 `key:"decoder_num_layers"`
	EncoderSequence int64 `key:"encoder_seq_length"`
	DecoderSequence int64 `key:"decoder_seq_length"`
}

// MegatronFP8 says what layers compute and parameters rest in fp8.
type MegatronFP8 struct {
	FP8       string `key:"fp8_format"`
	FP8Recipe string `key:"fp8_recipe"`
	FP8Gather bool   `key:"fp8_param_gather"`
	// ReusesGradients says that parameters in mxfp8 are gathered in the gradient buffer, and lie in no buffer.
	ReusesGradients bool `key:"reuse_grad_buf_for_mxfp8_param_ag"`
}

// MegatronSaving says how checkpoints are saved.
type MegatronSaving struct {
	ModelOnly  bool   `key:"no_save_optim"`
	Async      bool   `key:"async_save"`
	Persistent bool   `key:"use_persistent_ckpt_worker"`  // the process that writes stays
	Undivided  bool   `key:"no_ckpt_fully_parallel_save"` // the first of the ranks with a parameter writes it
	Format     string `key:"ckpt_format"`
}

//go:embed megatron_flags.txt
var megatronFlags string

// megatronSchema has Megatron-LM's defaults (megatron/training/arguments.py and the configurations that it makes flags
// of).
var megatronSchema = sync.OnceValue(func() *strict.Schema {
	return &strict.Schema{Program: "Megatron-LM", Rule: megatronRule()}
})

// IsArgument reports whether Megatron-LM has an argument of a name, and returns one that it may be meant for.
func IsArgument(name string) (is bool, meant string) {
	if is = megatronNames().Know(name); !is {
		meant = fault.Nearest(name, slices.Collect(maps.Keys(megatronSchema().Keys())))
	}
	return is, meant
}

// megatronNames are the names of all arguments.
var megatronNames = sync.OnceValue(func() strict.Names { return megatronSchema().Rule.Names() })

func megatronRule() strict.Rule {
	one, none := strict.Integer().Lax().From(1), strict.Integer().Lax().From(0)
	drop := strict.Number().Lax().From(0).To(1)
	kind := func(words string) strict.Rule {
		list := strings.Fields(words)
		return strict.Text(list...).Default(list[0])
	}
	return strict.Object(strict.Rule{}.For(megatronFlags),
		one.For(`num_layers hidden_size ffn_hidden_size num_attention_heads kv_channels seq_length
			max_position_embeddings encoder_num_layers decoder_num_layers encoder_seq_length decoder_seq_length
			micro_batch_size global_batch_size num_layers_per_virtual_pipeline_stage vocab_size
			num_virtual_stages_per_pipeline_rank microbatch_group_size_per_virtual_pipeline_stage num_experts
			moe_ffn_hidden_size moe_shared_expert_intermediate_size q_lora_rank mtp_num_layers ddp_bucket_size
			expert_tensor_parallel_size recompute_num_layers padded_vocab_size ddp_num_buckets`),
		none.For("optimizer_state_offload_chunk_size_mb decoder_first_pipeline_num_layers "+
			"decoder_last_pipeline_num_layers vocab_extra_ids seed"),
		one.Default(1).For(`num_query_groups tensor_model_parallel_size pipeline_model_parallel_size
			context_parallel_size expert_model_parallel_size num_distributed_optimizer_instances`),
		strict.Boolean().Lax().For(`group_query_attention use_flash_attn deterministic_mode swiglu squared_relu
			disable_bias_linear add_qkv_bias untie_embeddings_and_output_weights qk_layernorm bert_no_binary_head
			account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split sequence_parallel bf16 fp16
			fp8_param_gather reuse_grad_buf_for_mxfp8_param_ag use_distributed_optimizer overlap_grad_reduce overlap_param_gather
			accumulate_allreduce_grads_in_fp32 grad_reduce_in_bf16 use_precision_aware_optimizer optimizer_cpu_offload
			offload_optimizer_states no_pin_cpu_grads no_pin_cpu_params chunked_optimizer_state_offload
			no_gradient_accumulation_fusion defer_embedding_wgrad_compute
			cross_entropy_loss_fusion no_bias_gelu_fusion no_bias_swiglu_fusion moe_grouped_gemm
			multi_latent_attention use_rotary_position_embeddings no_position_embedding quick_geglu no_pad_vocab_size
			ddp_pad_buckets_for_high_nccl_busbw recompute_activations moe_layer_recompute
			moe_pad_expert_input_to_capacity moe_shared_expert_gate no_create_attention_mask_in_dataloader
			dataloader_inter_document_masking no_save_optim async_save use_persistent_ckpt_worker
			no_ckpt_fully_parallel_save`),
		strict.Text().For("vocab_file tokenizer_model cuda_graph_impl"),
		strict.Text().Or(strict.Integer()).For(
			"pipeline_model_parallel_layout moe_layer_freq nproc_per_node nnodes"),
		strict.Keys{
			"position_embedding_type": kind("learned_absolute rope none yarn mrope relative"),
			"attention_backend":       kind("auto flash fused unfused local"),
			"transformer_impl":        kind("transformer_engine local inference_optimized"),
			"attention_dropout":       drop.Default(0.1), "hidden_dropout": drop.Default(0.1),
			"normalization": kind("LayerNorm RMSNorm"), "tokenizer_type": strict.Text(),
			"make_vocab_size_divisible_by": one.Default(128), "fp8_format": strict.Text("e4m3", "hybrid"),
			"fp8_recipe":       kind("delayed tensorwise mxfp8 blockwise custom"),
			"optimizer":        kind("adam sgd muon dist_muon lion soap adaptive_muon"),
			"ckpt_format":      kind("torch_dist torch zarr torch_dcp fsdp_dtensor"),
			"main_grads_dtype": kind("fp32 bf16"), "main_params_dtype": kind("fp32 fp16"),
			"exp_avg_dtype": kind("fp32 fp16 bf16 fp8"), "exp_avg_sq_dtype": kind("fp32 fp16 bf16 fp8"),
			"optimizer_offload_fraction": drop.Default(1.), "optimizer_state_offload_fraction": drop.Default(1.),
			"recompute_granularity":     strict.Text("full", "selective"),
			"recompute_method":          strict.Text("uniform", "block"),
			"recompute_modules":         strict.List(strict.Text()).Or(strict.Text()),
			"cross_entropy_fusion_impl": kind("native te"), "moe_router_topk": one.Default(2),
			"moe_token_dispatcher_type":  kind("allgather alltoall flex"),
			"moe_expert_capacity_factor": strict.Number().Lax(), "kv_lora_rank": one.Default(32),
			"qk_head_dim": one.Default(128), "qk_pos_emb_head_dim": one.Default(64), "v_head_dim": one.Default(128),
		})
}

// ReadMegatron reads Megatron-LM's arguments: the path of a file, or what people type after the name of the script.
// Texts may stand for files.
func ReadMegatron(arguments string, texts files.Texts) (*Megatron, error) {
	file, text := "--megatron", []byte(arguments)
	var read []string
	if !strings.Contains(arguments, "--") || !strings.ContainsAny(arguments, " \n") {
		content, err := texts.Read(arguments, largest)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return nil, fault.File(arguments).Inputf("there is no such file").
				WithHint("give arguments of Megatron-LM, such as \"--num-layers 32 --hidden-size 4096\", or a file")
		case err != nil:
			return nil, &fault.Input{Where: fault.Position{File: arguments}, Err: err}
		}
		file, text = arguments, content
		path, _ := files.SplitFunction(arguments)
		read = []string{path}
	}
	d, source, err := parseMegatron(file, text)
	if err != nil {
		return nil, err
	}
	r, err := megatronSchema().Read(d)
	if err != nil {
		return nil, err
	}
	m := &Megatron{Given: arguments, Files: read, Script: source.script, given: r}
	if vocabulary := r.Word("vocab_file"); vocabulary != "" {
		if tokens, err := tokensIn(vocabulary); err == nil {
			m.FileTokens, m.Files = tokens, append(m.Files, vocabulary)
		}
	}
	r.Fill(m)
	m.Files = append(m.Files, source.files...)
	m.Notes = append(source.notes, r.Notes...)
	m.Ranks, m.RanksPerNode = source.ranks, source.perNode
	m.scripted = source.scripted
	processes, err := strconv.ParseInt(r.Word("nproc_per_node"), 10, 32)
	nodes, err2 := strconv.ParseInt(cmp.Or(r.Word("nnodes"), "1"), 10, 32)
	if err == nil && err2 == nil && processes > 0 && nodes > 0 {
		m.Ranks, m.RanksPerNode = processes*nodes, processes
	}
	return m, nil
}

// Sequences returns the sequences of a micro batch.
func (m *Megatron) Sequences() int64 {
	if m.Pairs {
		return 2 * m.MicroBatch
	}
	return m.MicroBatch
}

var errNoArguments = errors.New("there are no arguments of Megatron-LM")

const exampleArguments = "give arguments such as --num-layers 32 --hidden-size 4096"

// source is what a script says beside the arguments.
type source struct {
	scripted
	script         string
	notes          []Note
	ranks, perNode int64    // that the file says, 0 without
	files          []string // that a command names
}

// sourceOf returns what a script says beside the arguments, with the place of what it says.
func sourceOf(d *strict.Document, s *shell.Script) source {
	from := source{scripted: scripted{Unset: s.Unset, Looped: s.Looped}, notes: sourcedNotes(d, s)}
	for _, f := range missingParts(s) {
		from.Missing = append(from.Missing, f.Name)
	}
	return from
}

// MadeArguments are arguments of Megatron-LM that a command of another program means.
type MadeArguments struct {
	Root      *strict.Value
	Notes     []Note
	Reference bool // a second model is held without gradients
	Pairs     bool // each sequence is two
	Policy    *Policy
	Adapter   *CoreAdapter
	// Nodes and PerNode are the nodes and the ranks of each where arguments say them, 0 for as the launcher says.
	Nodes, PerNode int64
	// In is the document that the arguments have their places in, nil for the command itself. Files are those that were
	// read beside it.
	In    *strict.Document
	Files []string
}

// parseMegatron returns arguments as a document with a member for each, and the name of the script.
func parseMegatron(file string, text []byte) (*strict.Document, source, error) {
	if d := parsePython(file, text, nil); d != nil {
		if s := sectioned(d); s != nil {
			made, err := s.arguments()
			return made, s.source(), err
		}
	}
	if strict.IsYAML(file) || strings.HasPrefix(strings.TrimSpace(string(text)), "{") {
		d, err := strict.Parse(file, text)
		if err != nil {
			if other := parseAny(file, text); other != nil { // JSON with comments
				err = cmp.Or(expectArguments(other), err)
			}
			return nil, source{}, err
		}
		if s := sectioned(d); s != nil {
			d, err = s.arguments()
			return d, s.source(), err
		}
		if d, err = megatronYAML(d); err == nil {
			err = expectArguments(d)
		}
		return d, source{}, err
	}
	if what := nature(text); what != "" && what != script && what != shellScript && what != commandArguments {
		return nil, source{}, fault.File(file).Inputf("this is %s: expected arguments of Megatron-LM", what).
			WithHint(exampleArguments)
	}
	d, source, err := parseScript(file, text)
	if err != nil {
		return nil, source, err
	}
	return d, source, ArgumentsKind.own(d, &megatronSchema().Rule)
}

// parseScript returns the arguments of the training that a script starts, or those of a list.
func parseScript(file string, text []byte) (*strict.Document, source, error) {
	read, in, err := readScript(file, text)
	if err != nil {
		return nil, source{}, err
	}
	if started := trainings(read, in); len(started) == 1 && started[0].kind.Arguments != nil {
		return madeArguments(file, text, read, started[0])
	}
	launch, of, err := megatronTraining(file, read)
	if err != nil {
		return nil, source{}, err
	}
	d := &strict.Document{File: file, Text: text, Root: &strict.Value{Kind: '{'}}
	from := sourceOf(d, read)
	var words []shell.Word
	for i, w := range launch {
		if strings.HasSuffix(w.Text, ".py") {
			from.script = strings.TrimSuffix(filepath.Base(w.Text), ".py")
			words, launch = launch[:i], launch[i+1:]
			break
		}
	}
	launch, unset := withoutUnset(decided(read, launch))
	notes, err := unsetNotes(d, read, unset)
	if err != nil {
		return nil, source{}, err
	}
	from.notes = append(from.notes, notes...)
	d.Root.Members = withoutLauncher(commandMembers(words), commandMembers(launch))
	if err := computedMember(d); err != nil {
		return nil, source{}, err
	}
	if len(d.Root.Members) == 0 {
		return nil, source{}, &fault.Input{Where: fault.Position{File: file}, Err: errNoArguments,
			Hint: exampleArguments}
	}
	if err := ownProgram(d, of, in); err != nil {
		return nil, source{}, err
	}
	from.started(d, ofCommand(of, in))
	if of != nil {
		if line := launcher.Read(of, in); line != nil {
			from.Environment = environmentOf(d, line)
			from.notes = append(from.notes, turnNotes(d, line, line.Program[0].Text)...)
		}
	}
	return d, from, nil
}

// ownProgram refuses a program that is none of Megatron-LM's and has arguments that Megatron-LM does not: what it
// trains stands in its source.
func ownProgram(d *strict.Document, of *shell.Command, in launcher.Allocation) error {
	if of == nil {
		return nil
	}
	line := launcher.Read(of, in)
	if line == nil || strings.HasPrefix(filepath.Base(line.Program[0].Text), "pretrain_") {
		return nil
	}
	var own []string
	for _, m := range d.Root.Members {
		if !megatronNames().Know(m.Name) {
			own = append(own, m.Name)
		}
	}
	if len(own) == 0 || 2*len(own) > len(d.Root.Members) { // a program of another kind has few of Megatron-LM's
		return nil
	}
	return d.Inputf(line.Program[0].At, "the script starts %s, a program with arguments that Megatron-LM does not "+
		"have, such as --%s: what it trains is not planned on paper", line.Program[0].Text,
		strings.ReplaceAll(own[0], "_", "-")).WithHint(asItRuns(line))
}

// started has the ranks of a line that says them.
func (s *source) started(d *strict.Document, line *launcher.Line) {
	if line == nil {
		return
	}
	for _, u := range line.Unknown {
		s.UnknownRanks = append(s.UnknownRanks, Count{d.Position(u.At), u.Name, 0})
	}
	if line.PerNode == nil || len(line.Unknown) > 0 {
		return
	}
	nodes := 1
	if line.Nodes != nil {
		nodes = line.Nodes.Is
	}
	s.perNode, s.ranks = int64(line.PerNode.Is), int64(line.PerNode.Is)*int64(nodes)
}

// madeArguments returns the arguments that a command of another program means.
func madeArguments(file string, text []byte, read *shell.Script, t training) (*strict.Document, source, error) {
	given := &strict.Document{File: file, Text: text, Root: t.root()}
	ofFlags := !t.kind.Assigns && t.kind.Command == nil
	if ofFlags && len(t.arguments) > 0 && !strings.HasPrefix(t.arguments[0].Text, "-") {
		return nil, source{}, given.Inputf(t.arguments[0].At, "%s takes its arguments from %s, which is not read yet",
			t.command, t.arguments[0].Text).WithHint("give them behind the command: --key value")
	}
	made, err := t.kind.Arguments(given)
	if err != nil {
		return nil, source{}, err
	}
	if v := launchVariables(t.kind); v != nil {
		t.line.Variables(v[0], v[1])
	}
	from := sourceOf(given, read)
	from.Environment = environmentOf(given, t.line)
	notes, err := unsetNotes(given, read, t.unset)
	if err != nil {
		return nil, source{}, err
	}
	from.Reference, from.Pairs, from.Policy, from.Adapter = made.Reference, made.Pairs, made.Policy, made.Adapter
	from.notes = slices.Concat(from.notes, notes, turnNotes(given, t.line, t.command), made.Notes)
	if from.started(given, t.line); made.PerNode > 0 {
		from.perNode, from.ranks, from.UnknownRanks = made.PerNode, made.PerNode*max(1, made.Nodes), nil
	}
	if from.files = made.Files; made.In != nil {
		return made.In, from, nil
	}
	return &strict.Document{File: file, Text: text, Root: made.Root}, from, nil
}

// ofCommand reads how a command starts ranks, nil for none.
func ofCommand(c *shell.Command, in launcher.Allocation) *launcher.Line {
	if c == nil {
		return nil
	}
	if line := launcher.Read(c, in); line != nil && line.By != "" {
		return line
	}
	return nil
}

// megatronMark is a member of the document of a script, by which it is recognized.
const megatronMark = "megatron_lm"

// parseArguments returns the arguments of Megatron-LM that a script or a list of arguments has, or nil if it has none.
func parseArguments(file string, text []byte) *strict.Document {
	if what := nature(text); strict.IsYAML(file) || what != script && what != shellScript && what != commandArguments {
		return nil
	}
	mark := strict.Member{Name: megatronMark, Value: strict.Of(true)}
	d, _, err := parseScript(file, text)
	if errors.Is(err, errNoArguments) || err != nil && strings.Contains(err.Error(), "Bash") {
		return nil
	}
	if err != nil { // it starts several trainings
		return &strict.Document{File: file, Text: text,
			Root: &strict.Value{Kind: '{', Members: []strict.Member{mark}}}
	}
	isSize := func(m strict.Member) bool {
		return slices.Contains([]string{"num_layers", "encoder_num_layers", "hidden_size"}, m.Name)
	}
	known := 0
	for _, m := range d.Root.Members {
		if megatronNames().Know(m.Name) {
			known++
		}
	}
	if !slices.ContainsFunc(d.Root.Members, isSize) || 2*known < len(d.Root.Members) {
		return nil // of another program
	}
	d.Root.Members = append(d.Root.Members, mark)
	return d
}

// expectArguments refuses a file of another kind, which a key shows that Megatron-LM does not have, and one whose keys
// are mostly unknown.
func expectArguments(d *strict.Document) error {
	rule := &megatronSchema().Rule
	if found, m := recognized(d.Root); found != nil && found != ArgumentsKind && !rule.Names().Know(m.Name) {
		return ArgumentsKind.misplaced(d, found, m)
	}
	return ArgumentsKind.own(d, rule)
}

// megatronTraining returns the command that trains: the only one with a Python script and arguments of a model, or all
// words of all commands and arrays if none has. It returns the command itself, too.
func megatronTraining(file string, s *shell.Script) ([]shell.Word, *shell.Command, error) {
	var found []*shell.Command
	for _, c := range s.Commands {
		isScript := func(w shell.Word) bool {
			return strings.HasSuffix(w.Text, ".py") && !strings.Contains(w.Text, " ")
		}
		isSize := func(w shell.Word) bool { return strings.Contains(w.Text, "-layers") || w.Text == "--hidden-size" }
		if slices.ContainsFunc(c.Words, isScript) && slices.ContainsFunc(c.Words, isSize) &&
			c.Words[0].Text != "echo" {
			found = append(found, c)
		}
	}
	if len(found) > 1 {
		return nil, nil, fault.File(file).Inputf("the script starts %d trainings", len(found)).
			WithHint("give the arguments of one")
	}
	if len(found) == 1 {
		return found[0].Words, found[0], nil
	}
	var all []shell.Word
	for _, name := range slices.Sorted(maps.Keys(s.Lists)) {
		all = append(all, s.Lists[name]...)
	}
	for _, c := range s.Commands {
		all = append(all, c.Words...)
	}
	return all, nil, nil
}

// withoutLauncher returns the last argument of each name. Of the launcher's it keeps the number of ranks.
func withoutLauncher(launcher, members []strict.Member) []strict.Member {
	var list []strict.Member
	kept := []string{"nproc_per_node", "nnodes"}
	for _, m := range launcher {
		if slices.Contains(kept, m.Name) {
			list = append(list, m)
		}
	}
	dropped := strings.Fields("node_rank master_addr master_port rdzv_endpoint rdzv_backend rdzv_id standalone " +
		"max_restarts log_dir tee redirects")
	for _, m := range members {
		if !slices.Contains(dropped, m.Name) {
			list = append(list, m)
		}
	}
	return list
}

// largestVocabulary is the limit of a file with a vocabulary.
const largestVocabulary = 64 << 20

// tokensIn returns the number of tokens in a vocabulary: the members of JSON or the lines of a text.
func tokensIn(file string) (int64, error) {
	text, err := files.Read(file, largestVocabulary)
	if err != nil || !strings.HasSuffix(file, ".json") {
		return int64(bytes.Count(text, []byte{'\n'})), err
	}
	d, err := strict.ParseJSON(file, text)
	if err != nil {
		return 0, err
	}
	return int64(len(d.Root.Members)), nil
}

// megatronYAML returns the arguments of a YAML file: its MODEL_ARGS, as in Megatron-LM's functional tests, or all keys.
func megatronYAML(d *strict.Document) (*strict.Document, error) {
	if m := d.Root.Member("MODEL_ARGS"); m != nil {
		d = &strict.Document{File: d.File, Text: d.Text, Root: m.Value}
	}
	if d.Root.Kind != '{' {
		return nil, d.Inputf(d.Root.At, "expected arguments of Megatron-LM, found %v", d.Root)
	}
	for i := range d.Root.Members {
		m := &d.Root.Members[i]
		m.Name = strings.ReplaceAll(strings.TrimPrefix(m.Name, "--"), "-", "_")
		// The functional tests write lists as words between brackets, which YAML reads as one element.
		v := m.Value
		if v.Kind == '[' && len(v.Elements) == 1 && strings.Contains(v.Elements[0].Text, " ") {
			v = v.Elements[0]
		}
		if text := strings.Trim(v.Text, "[]"); m.Name == "recompute_modules" && v.Kind == '"' {
			m.Value = &strict.Value{Kind: '[', At: v.At}
			for word := range strings.FieldsSeq(text) {
				m.Value.Elements = append(m.Value.Elements, &strict.Value{Kind: '"', At: v.At, Text: word})
			}
		}
	}
	return d, nil
}

// Others returns the given arguments that no field has, without those that are false, none or zero.
func (m *Megatron) Others() []string {
	planned := map[string]bool{"nproc_per_node": true, "nnodes": true}
	addKeys(planned, reflect.TypeFor[Megatron]())
	var list []string
	for _, member := range m.given.Document.Root.Members {
		v := member.Value
		isOff := v.Kind == 'f' || v.Kind == 'n' || v.Kind == '"' && strings.EqualFold(v.Text, "none") ||
			v.Kind == '0' && v.Text == "0"
		if !planned[member.Name] && !isOff {
			list = append(list, member.Name)
		}
	}
	return list
}

// addKeys adds the keys of a struct's fields, and of the structs in it.
func addKeys(keys map[string]bool, of reflect.Type) {
	for f := range of.Fields() {
		key, tagged := f.Tag.Lookup("key")
		if tagged && key == "" {
			addKeys(keys, f.Type)
		}
		keys[key] = true
	}
}

// Gives reports whether an argument was given.
func (m *Megatron) Gives(key string) bool { return m.given.Gives(key) }

// Fault returns an error at the place of an argument.
func (m *Megatron) Fault(key, what, hint string) error { return m.given.Fault(key, what, hint) }
