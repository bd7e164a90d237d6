package trl

import (
	"plimsoll/internal/input/python"
	"plimsoll/internal/input/recipe"
	"plimsoll/internal/input/recipe/strict"
)

// trainers are TRL's trainers, and those that stand in their place, with the key that says what a script trains.
var trainers = map[string]string{"SFTTrainer": "trl_sft", "DPOTrainer": "trl_dpo", "KTOTrainer": "trl_kto",
	"RewardTrainer": "trl_reward", "GRPOTrainer": "trl_grpo", "RLOOTrainer": "trl_rloo", "CPOTrainer": "cpo_alpha",
	"ORPOTrainer": "cpo_alpha", "UnslothTrainer": "trl_sft"}

// ofTrainer are arguments of trainers that are those of the configuration in older releases, or that change memory.
var ofTrainer = []string{"max_seq_length", "max_length", "max_prompt_length", "beta", "packing", "loss_type",
	"optimizers", "optimizer_cls_and_kwargs", "compute_loss_func", "precompute_ref_log_probs"}

// fromPython makes a configuration of a source that calls one of TRL's trainers.
func fromPython(source *python.Source, _ string) *strict.Value {
	var trainer *python.Value
	for _, c := range source.Calls {
		if trainers[c.Name()] == "" || c.From != nil || !recipe.OfLibrary(c) {
			continue
		}
		if trainer != nil {
			return recipe.Several(int64(c.At))
		}
		trainer = c
	}
	if trainer == nil {
		return nil
	}
	root := &strict.Value{Kind: '{', At: int64(max(0, trainer.At))}
	recipe.Give(root, trainers[trainer.Name()], root.At, strict.Of(1))
	recipe.TrainerOfSource(root, source, trainer)
	for _, name := range ofTrainer {
		if is := trainer.Attribute(name); is != nil && is.Kind != python.None {
			recipe.Give(root, name, root.At, recipe.Literal(is, trainer.At))
		}
	}
	rewards(root, trainer)
	unslothLength(root)
	if loaded := root.Member(recipe.Loaded); loaded != nil && generating(trainer) && isUnsloth(classOf(loaded.Value)) {
		root.Members = []strict.Member{root.Members[0], *loaded} // which no plan is made of: unsloth says why
	}
	return root
}

// unslothLength gives a training the length of sequences that Unsloth's loader gets, where its own arguments have none.
func unslothLength(root *strict.Value) {
	loaded := root.Member(recipe.Loaded)
	if loaded == nil || !isUnsloth(classOf(loaded.Value)) || root.Member("max_length") != nil ||
		root.Member("max_seq_length") != nil {
		return
	}
	length := strict.Of(2048) // the default of from_pretrained
	if m := loaded.Value.Member("max_seq_length"); m != nil {
		length = m.Value
	}
	recipe.Give(root, "max_seq_length", loaded.Value.At, length)
}

// generating reports whether a trainer generates answers.
func generating(trainer *python.Value) bool {
	return trainer.Name() == "GRPOTrainer" || trainer.Name() == "RLOOTrainer"
}

// classOf returns the class that loads a model.
func classOf(loaded *strict.Value) string {
	if m := loaded.Member("class"); m != nil {
		return m.Value.Text
	}
	return ""
}

// rewards reads what rewards answers. Functions take no memory of a GPU.
func rewards(root *strict.Value, trainer *python.Value) {
	all := trainer.Attribute("reward_funcs")
	if all == nil {
		return
	}
	list := []*python.Value{all}
	if all.Kind == python.List {
		list = all.Elements
	}
	for _, is := range list {
		switch is.Kind {
		case python.Text:
			recipe.Give(root, "reward_funcs", root.At, recipe.Literal(all, trainer.At))
		case python.Object:
			recipe.Give(root, "reward_model_name_or_path", root.At, strict.Of(is.Class))
		case python.Unknown:
			recipe.Give(root, "reward_funcs", root.At, recipe.Literal(is, trainer.At))
		}
	}
}
