// Package slime reads commands of slime and of its forks miles and vime. They train policies by Megatron core on
// answers that SGLang generates, or vLLM with vime.
package slime

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/input/recipe"
	"plimsoll/internal/input/recipe/bridge"
	"plimsoll/internal/input/recipe/strict"
)

// mark is the member of a document that stands for a command.
const mark = "slime_train"

// Kind is the kind of the commands of slime and miles. Their arguments are those of Megatron-LM, with more beside.
var Kind = &recipe.Kind{Name: "training of slime or miles", Flag: recipe.MegatronFlag, Marks: mark,
	Commands: map[string]string{"train.py": mark, "train_async.py": mark},
	Asks:     "--actor-num-nodes --actor-num-gpus-per-node --rollout-batch-size",
	Known:    &schema.Rule, Arguments: read,
	Settings: recipe.ArgumentKeys(recipe.SettingKeys{
		recipe.PackedTokens:         {Path: "max_tokens_per_gpu"},
		recipe.SampleBound:          {Path: "rollout_max_context_len"},
		recipe.DistributedOptimizer: {Path: "use_distributed_optimizer", Unset: true},
		recipe.RolloutFraction:      {Path: "sglang_mem_fraction_static", Says: recipe.AssignedFraction},
	}, recipe.MicroBatch, recipe.TrainBatch, recipe.Accumulation, recipe.FusedLoss, recipe.FusedLossBy,
		// Megatron-LM's own loop moves states, and these programs have loops of their own.
		recipe.StatesOffload, recipe.ChunkedStatesOffload)}

// reader makes arguments of Megatron-LM of a command.
type reader struct {
	*strict.Reader
	hidden []*strict.Value // commands whose outputs are arguments
	made   *strict.Value
	policy *recipe.Policy
	vllm   bool // arguments of vLLM are given: vime has it in place of SGLang
}

// read reads a command.
func read(d *strict.Document) (recipe.MadeArguments, error) {
	r := &reader{made: &strict.Value{Kind: '{', At: d.Root.At}, policy: &recipe.Policy{Program: "slime or miles",
		Packs: true}}
	own := &strict.Document{File: d.File, Text: d.Text, Root: &strict.Value{Kind: '{', At: d.Root.At}}
	var others, unset []strict.Member
	for _, m := range d.Root.Members {
		r.vllm = r.vllm || strings.HasPrefix(m.Name, "vllm_")
		if negated, is := strings.CutPrefix(m.Name, "no_"); is && names().Know(negated) {
			m.Name, m.Value = negated, strict.Of(false)
		}
		if v := m.Value; slices.Contains(strings.Fields(switches), m.Name) && strings.HasPrefix(v.Text, "$(") {
			r.hidden = append(r.hidden, v) // a command whose output are further arguments
			m.Value = strict.Of(true)
		}
		if strings.HasPrefix(m.Name, "actor_num_") && strings.HasPrefix(m.Value.Text, "$") {
			unset = append(unset, m)
			continue
		}
		if names().Know(m.Name) || m.Name == mark {
			own.Root.Members = append(slices.DeleteFunc(own.Root.Members, func(before strict.Member) bool {
				return before.Name == m.Name
			}), m)
		} else {
			others = append(others, m)
		}
	}
	var err error
	if r.Reader, err = schema.Read(own); err != nil {
		return recipe.MadeArguments{}, err
	}
	for _, m := range others {
		r.pass(m)
	}
	for _, m := range unset {
		r.Notes = append(r.Notes, recipe.Note{Where: r.Position(m.At), What: fmt.Sprintf("--%s is %s, which the "+
			"script does not set: %d counts, slime's default (give --gpus and --nodes)", dashed(m.Name), m.Value.Text,
			r.Integer(m.Name))})
	}
	for _, step := range []func() error{r.sizes, r.refuse, r.lengths, r.batch, r.engine} {
		if err := step(); err != nil {
			return recipe.MadeArguments{}, err
		}
	}
	r.copies()
	r.loss()
	r.defaults()
	r.remarks()
	return recipe.MadeArguments{Root: r.made, Notes: r.Notes, Policy: r.policy, Nodes: r.Integer("actor_num_nodes"),
		PerNode: r.Integer("actor_num_gpus_per_node")}, nil
}

// pass gives an argument of Megatron-LM as it is. The parsers of these programs ignore what they do not know, so it is
// noted.
func (r *reader) pass(m strict.Member) {
	if strings.HasPrefix(m.Name, "sglang_") || strings.HasPrefix(m.Name, "router_") ||
		strings.HasPrefix(m.Name, "vllm_") {
		r.ofEngine(m)
		return
	}
	if is, meant := recipe.IsArgument(m.Name); !is {
		what := "--" + dashed(m.Name) + " is no argument of slime, miles or Megatron-LM, which ignore it"
		if own := fault.Nearest(m.Name, slices.Collect(maps.Keys(schema.Keys()))); own != "" {
			meant = own
		}
		if meant != "" {
			what += ": did you mean --" + dashed(meant) + "?"
		}
		r.Notes = append(r.Notes, recipe.Note{Where: r.Position(m.At), What: what})
		return
	}
	if m.Name == "offload_optimizer_states" || m.Name == "chunked_optimizer_state_offload" {
		r.Notes = append(r.Notes, recipe.Note{Where: r.Position(m.At), What: "--" + dashed(m.Name) + " is planned as " +
			"Megatron-LM's training loop has it, and these programs have loops of their own"})
	}
	recipe.Give(r.made, m.Name, m.At, m.Value)
}

func dashed(name string) string { return strings.ReplaceAll(name, "_", "-") }

// give sets an argument of Megatron-LM at the place of a key, or of the command.
func (r *reader) give(argument, of string, is any) {
	at := r.Root.At
	if v := r.Find(of); v != nil {
		at = v.At
	}
	recipe.Give(r.made, argument, at, strict.Of(is))
}

// number returns an argument of Megatron-LM that is a number.
func (r *reader) number(argument string, usual int64) int64 {
	if m := r.made.Member(argument); m != nil {
		if n, err := strconv.ParseInt(m.Value.Text, 10, 32); err == nil && n > 0 {
			return n
		}
	}
	return usual
}

// refuse refuses what is not planned.
func (r *reader) refuse() error {
	const hint = "leave it out, and expect the job's memory to differ from the plan"
	for _, of := range refused {
		for key := range strings.FieldsSeq(of.keys) {
			if v := r.Find(key); recipe.On(v) && !slices.Contains(strings.Fields(of.usual), v.Text) {
				return r.Fault(key, fmt.Sprintf("is %s: %s, which is not planned yet", v, of.why), hint)
			}
		}
	}
	if r.made.Member("seq_length") == nil && r.longest() == 0 && !r.Truth("use_dynamic_batch_size") {
		return r.Inputf(r.Root.At, "nothing says how long sequences are").
			WithHint("add --rollout-max-context-len, or --use-dynamic-batch-size with --max-tokens-per-gpu")
	}
	return nil
}

// longest returns the tokens of the longest sample, 0 if nothing says them.
func (r *reader) longest() int64 {
	if most := r.Integer("rollout_max_context_len"); most > 0 {
		return most
	}
	return r.Integer("rollout_max_prompt_len") + r.Integer("rollout_max_response_len")
}

// sizes gives the sizes of the model where no argument does, but a command that is not run. They are those of
// --hf-checkpoint, as these programs end with an error for others (_hf_validate_args in megatron_utils/arguments.py).
func (r *reader) sizes() error {
	if r.hidden == nil {
		return nil
	}
	says := r.hidden[0].Text + " prints arguments that plimsoll does not read"
	if r.made.Member("num_layers") != nil {
		r.Notes = append(r.Notes, recipe.Note{Where: r.Position(r.hidden[0].At), What: says})
		return nil
	}
	name := r.Find("hf_checkpoint")
	if name == nil {
		return r.Inputf(r.hidden[0].At, "%s prints arguments of the model, and plimsoll does not run it",
			r.hidden[0].Text).WithHint("put what it prints in its place")
	}
	short := lastFolder(name)
	config, notes, err := bridge.Sizes(r.Document, r.made, short)
	if err != nil {
		return err
	}
	r.Notes = append(r.Notes, notes...)
	if config.Member("num_experts") != nil || config.Member("n_routed_experts") != nil {
		r.give("moe_grouped_gemm", "hf_checkpoint", true)
		r.give("moe_token_dispatcher_type", "hf_checkpoint", "alltoall")
	}
	r.Notes = append(r.Notes, recipe.Note{Where: r.Position(r.hidden[0].At),
		What: says + ": the sizes are those of " + short.Text + " (--hf-checkpoint)"})
	return nil
}

// lengths gives the tokens of a micro batch, which is one row of packed samples (get_batch in
// megatron_utils/data.py). A sample that is longer than a micro batch has one of its own (dp_schedule.py).
func (r *reader) lengths() error {
	context, longest := r.number("context_parallel_size", 1), r.longest()
	key, tokens := "max_tokens_per_gpu", r.Integer("max_tokens_per_gpu")*context
	switch {
	case !r.Truth("use_dynamic_batch_size"):
		if longest == 0 {
			longest = r.number("seq_length", 0)
		}
		key, tokens = "micro_batch_size", max(1, r.Integer("micro_batch_size"))*longest
	case tokens == 0:
		return r.Fault("use_dynamic_batch_size", "is given without --max-tokens-per-gpu",
			"slime asserts that both are given")
	case longest > tokens:
		r.Note(key, fmt.Sprintf("is less than the longest sample: a micro batch of its own has %d tokens", longest))
		tokens = longest
	}
	if r.Integer("rollout_max_context_len")+r.Integer("rollout_max_prompt_len") == 0 && longest > 0 {
		r.Note("rollout_max_response_len", "says how long answers are, and nothing how long prompts are: samples "+
			"count as long as answers (give --rollout-max-context-len)")
		if key != "max_tokens_per_gpu" || longest >= tokens {
			r.policy.LeftOut = append(r.policy.LeftOut, "prompts, whose length nothing says")
		}
	}
	if longest == 0 {
		r.policy.LeftOut = append(r.policy.LeftOut, "samples of more than --max-tokens-per-gpu")
	}
	unit := r.number("tensor_model_parallel_size", 1) * r.Integer("data_pad_size_multiplier") * context
	if key == "max_tokens_per_gpu" {
		r.policy.PackedTokens = r.Integer(key)
	}
	r.give("seq_length", key, int((tokens+unit-1)/unit*unit))
	r.give("micro_batch_size", key, 1)
	r.give("no_create_attention_mask_in_dataloader", key, true)
	if r.made.Member("max_position_embeddings") == nil {
		r.give("max_position_embeddings", key, int(r.number("seq_length", 1)))
	}
	return nil
}

// batch gives the micro batches of an optimizer step, as many as samples of the greatest length fill.
func (r *reader) batch() error {
	samples, key := r.Integer("global_batch_size"), "global_batch_size"
	each := r.Integer("rollout_batch_size") * r.Integer("n_samples_per_prompt")
	if samples == 0 {
		samples, key = each/max(1, r.Integer("num_steps_per_rollout")), "rollout_batch_size"
	}
	if samples == 0 {
		return r.Inputf(r.Root.At, "nothing says how many samples an optimizer step has").
			WithHint("add --rollout-batch-size and --global-batch-size")
	}
	sequence, longest := r.number("seq_length", 1), r.longest()
	if longest == 0 {
		longest = sequence
	}
	pipeline := r.number("pipeline_model_parallel_size", 1)
	model := r.number("tensor_model_parallel_size", 1) * pipeline * r.number("context_parallel_size", 1)
	data := max(1, r.Integer("actor_num_nodes")*r.Integer("actor_num_gpus_per_node")/model)
	micros := max(1, (samples*longest+sequence*data-1)/(sequence*data))
	if r.made.Member("num_layers_per_virtual_pipeline_stage") != nil ||
		r.made.Member("num_virtual_stages_per_pipeline_rank") != nil {
		micros = (micros + pipeline - 1) / pipeline * pipeline // expand_bins_by_splitting
	}
	r.give("global_batch_size", key, int(micros*data))
	return nil
}

// copies says which copies of the parameters wait on the host: one for each tag of TensorBackuper
// (MegatronTrainRayActor.init in megatron_utils/actor.py).
func (r *reader) copies() {
	p := r.policy
	p.Reference = r.Number("kl_coef") != 0 || r.Truth("use_kl_loss")
	if !r.Truth("disable_weights_backuper") {
		p.Copies = append(p.Copies, "actor")
	}
	if r.Truth("use_opd") && r.Word("opd_type") == "megatron" {
		p.Copies = append(p.Copies, "teacher")
	}
	if r.Truth("keep_old_actor") {
		p.Copies = append(p.Copies, "old actor")
		if r.Integer("update_weights_interval") == 1 {
			p.Copies = append(p.Copies, "rollout actor")
		}
	}
	if p.Engine != nil {
		p.Engine.Copies, p.Engine.HostReference = int64(len(p.Copies)), p.Reference
	}
}

// loss says how the loss is made of logits, and whether log-probabilities are made before the update
// (get_log_probs_and_entropy in megatron_utils/loss.py, train_actor in megatron_utils/actor.py).
func (r *reader) loss() {
	isPolicy := r.Word("loss_type") == "policy_loss"
	r.policy.Loss = recipe.PolicyLoss{Scaled: r.Number("rollout_temperature") != 1,
		TrainsEntropy: isPolicy && r.Number("entropy_coef") != 0, Masked: isPolicy && r.Number("rollout_top_p") != 1,
		Chunk: max(0, r.Integer("log_probs_chunk_size"))}
	if r.Truth("disable_compute_advantages_and_returns") {
		return
	}
	each := r.Integer("rollout_batch_size") * r.Integer("n_samples_per_prompt")
	steps := r.Integer("num_steps_per_rollout")
	if n := r.Integer("global_batch_size"); n > 0 {
		steps = each / n
	}
	reuses := steps <= 1 && isPolicy && r.Number("kl_coef") == 0 && !r.Truth("use_rollout_logprobs") &&
		!r.Truth("get_mismatch_metrics") && !r.Truth("keep_old_actor") && !r.Truth("use_opd") &&
		(!r.Truth("use_routing_replay") || r.Truth("use_rollout_routing_replay")) &&
		r.Word("advantage_estimator") != "gspo"
	made := !reuses && (!r.Truth("use_rollout_logprobs") || r.Truth("get_mismatch_metrics"))
	r.policy.Judges = r.policy.Reference || slices.Contains(r.policy.Copies, "teacher") || made
}

// defaults gives what these programs always have (_set_default_megatron_args in megatron_utils/arguments.py).
func (r *reader) defaults() {
	r.give("use_distributed_optimizer", "", true)
	if r.made.Member("fp16") == nil {
		r.give("bf16", "", true)
	}
	if r.Truth("async_save") {
		r.give("async_save", "async_save", true)
		r.give("use_persistent_ckpt_worker", "async_save", true)
	}
	for key := range strings.FieldsSeq("no_save_optim mtp_num_layers padded_vocab_size") {
		if v := r.Find(key); recipe.On(v) {
			recipe.Give(r.made, key, v.At, v)
		}
	}
	if m := r.made.Member("moe_token_dispatcher_type"); m != nil && m.Value.Text == "allgather" {
		m.Value = strict.Bare("alltoall", m.Value.At)
	}
	if r.made.Member("tokenizer_type") == nil && r.made.Member("tokenizer_model") == nil {
		r.give("tokenizer_type", "hf_checkpoint", "HuggingFaceTokenizer")
		r.give("tokenizer_model", "hf_checkpoint", r.Word("hf_checkpoint"))
	}
}

// remarks notes keys that change memory in a way that the plan leaves out.
func (r *reader) remarks() {
	for _, key := range slices.Sorted(maps.Keys(noted)) {
		if v := r.Find(key); recipe.On(v) && v.Text != "none" {
			r.Note(key, noted[key])
		}
	}
}
