package recipe

import (
	"strings"

	"plimsoll/internal/input/launcher"
	"plimsoll/internal/input/recipe/strict"
	"plimsoll/internal/input/shell"
)

// bundled are TRL's own configurations of accelerate, by the names that --accelerate_config takes:
// trl/accelerate_configs of TRL 1.16.0. All but the first name 8 ranks.
var bundled = map[string]string{
	"single_gpu": "distributed_type: 'NO'\nmixed_precision: bf16\nnum_processes: 1\n",
	"multi_gpu":  "distributed_type: MULTI_GPU\nmixed_precision: bf16\nnum_processes: 8\n",
	"fsdp1": "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 8\nfsdp_config:\n  fsdp_version: 1\n" +
		"  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  fsdp_reshard_after_forward: FULL_SHARD\n" +
		"  fsdp_backward_prefetch: BACKWARD_PRE\n  fsdp_forward_prefetch: true\n  fsdp_offload_params: false\n" +
		"  fsdp_state_dict_type: FULL_STATE_DICT\n  fsdp_activation_checkpointing: false\n" +
		"  fsdp_sync_module_states: true\n  fsdp_use_orig_params: true\n  fsdp_cpu_ram_efficient_loading: true\n",
	"fsdp2": "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 8\nfsdp_config:\n  fsdp_version: 2\n" +
		"  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  fsdp_activation_checkpointing: false\n" +
		"  fsdp_reshard_after_forward: true\n  fsdp_state_dict_type: FULL_STATE_DICT\n" +
		"  fsdp_cpu_ram_efficient_loading: true\n",
	"zero1": zeroOf("1", "  zero3_init_flag: false\n"),
	"zero2": zeroOf("2", "  offload_optimizer_device: none\n  offload_param_device: none\n  zero3_init_flag: false\n"),
	"zero3": zeroOf("3", "  offload_optimizer_device: none\n  offload_param_device: none\n  zero3_init_flag: true\n"+
		"  zero3_save_16bit_model: true\n"),
}

func zeroOf(stage, rest string) string {
	return "distributed_type: DEEPSPEED\nmixed_precision: bf16\nnum_processes: 8\ndeepspeed_config:\n  zero_stage: " +
		stage + "\n" + rest
}

// accelerate finds the configuration of accelerate that a line says: its file, and over it the launcher's flags.
func (s *starter) accelerate() error {
	if !strings.HasPrefix(s.line.By, "accelerate") {
		return nil
	}
	d, err := s.accelerateFile()
	if err != nil || d == nil && !s.saysAccelerate() {
		return err
	}
	if d == nil {
		kind := "MULTI_GPU"
		if s.line.Total != nil && s.line.Total.Is == 1 {
			kind = "NO"
		}
		d = &strict.Document{File: s.document.File, Text: s.document.Text, Root: &strict.Value{Kind: '{'}}
		d.Root.Set("distributed_type", s.line.At, strict.Of(kind))
	}
	s.overAccelerate(d)
	s.to.Accelerate = d
	s.ranksOf(d)
	return nil
}

// ranksOf takes the nodes and the ranks of a configuration that flags do not say.
func (s *starter) ranksOf(d *strict.Document) {
	l := s.line
	machines, processes := d.Root.Find("num_machines"), d.Root.Find("num_processes")
	if l.Total == nil && processes != nil && processes.Integer > 0 { // the job reads both from the configuration
		l.PerNode, l.EveryDevice = nil, false
		return
	}
	if l.Nodes == nil && l.Total != nil && machines != nil && machines.Integer > 1 {
		l.Nodes = &launcher.Count{At: l.Total.At, Name: "num_machines of the configuration", Is: int(machines.Integer)}
		l.PerNode = &launcher.Count{At: l.Total.At, Name: l.Total.Name, Is: max(1, l.Total.Is/l.Nodes.Is)}
	}
}

// accelerateFile returns the file that a line names, nil for none.
func (s *starter) accelerateFile() (*strict.Document, error) {
	name, is := s.line.Options["config_file"]
	if !is {
		return nil, nil
	}
	if text, is := bundled[name.Text]; is {
		return strict.ParseYAML(name.Text+".yaml of TRL", []byte(text))
	}
	path, text, err := s.find(name)
	if err != nil {
		return nil, err
	}
	return strict.Parse(path, text)
}

// enginesByFlag are the flags of accelerate launch that choose an engine.
var enginesByFlag = map[string]string{"use_deepspeed": "DEEPSPEED", "use_fsdp": "FSDP", "multi_gpu": "MULTI_GPU"}

// saysAccelerate reports whether flags say more than ranks.
func (s *starter) saysAccelerate() bool {
	for flag := range s.line.Options {
		if enginesByFlag[flag] != "" || flag == "mixed_precision" || flag == "cpu" {
			return true
		}
	}
	return false
}

// overAccelerate puts flags over the keys of a configuration.
func (s *starter) overAccelerate(d *strict.Document) {
	own := d.File == s.document.File
	for flag, w := range s.line.Options {
		key := accelerateKeyOf(flag)
		if kind := enginesByFlag[flag]; kind != "" {
			key, w = "distributed_type", shell.Word{Text: kind, At: w.At}
		}
		if key == "" || strings.Contains(w.Text, "$") {
			continue
		}
		at := w.At
		if !own { // places are those of the file
			at = d.Root.At
		}
		put(d.Root, key, strict.Bare(w.Text, at))
	}
	if s.line.Total == nil && s.line.PerNode != nil {
		nodes := 1
		if s.line.Nodes != nil {
			nodes = s.line.Nodes.Is
		}
		if own {
			put(d.Root, "num_processes", strict.Of(s.line.PerNode.Is*nodes))
		}
	}
}

// put sets a key of an object in place of the value that it has.
func put(root *strict.Value, key string, to *strict.Value) {
	if v := root.Find(key); v != nil {
		at := v.At
		*v = *to
		v.At = at
		return
	}
	root.Set(key, to.At, to)
}

// accelerateKeyOf returns the key that a flag goes before, "" for flags that no plan depends on.
func accelerateKeyOf(flag string) string {
	switch {
	case flag == "n":
		return "num_processes"
	case strings.HasPrefix(flag, "fsdp_"):
		return "fsdp_config." + flag
	case strings.HasPrefix(flag, "parallelism_config_"):
		return "parallelism_config." + flag
	case strings.HasPrefix(flag, "dynamo_"):
		return "dynamo_config." + flag
	}
	switch flag {
	case "num_processes", "num_machines", "mixed_precision":
		return flag
	case "cpu":
		return "use_cpu"
	case "zero_stage", "offload_optimizer_device", "offload_param_device", "gradient_accumulation_steps",
		"gradient_clipping", "zero3_init_flag", "zero3_save_16bit_model", "deepspeed_moe_layer_cls_names":
		return "deepspeed_config." + flag
	case "deepspeed_config_file":
		return "deepspeed_config." + flag
	}
	return ""
}
