package python

import (
	"fmt"
	"strings"
	"testing"
)

// TestArguments holds what argparse makes of a command line.
func TestArguments(t *testing.T) {
	const parser = `import argparse
p = argparse.ArgumentParser(description="d")
p.add_argument("model")
p.add_argument("--bs", "-b", type=int, default=2)
g = p.add_argument_group("more")
g.add_argument("--rate", type=float)
g.add_argument("--packing", action="store_true")
g.add_argument("--no-cache", dest="cache", action="store_false")
g.add_argument("--targets", nargs="+", default=["q"])
g.add_argument("--bf16", type=bool, default=False)
g.add_argument("--fused", action=argparse.BooleanOptionalAction, default=True)
g.add_argument("--kind", type=lambda s: s.upper())
p.set_defaults(name="n")
args = p.parse_args()
show(args.model, args.bs, args.rate, args.packing, args.cache, args.targets, args.bf16, args.fused, args.kind, args.name)
`
	for _, c := range []struct{ command, want string }{
		{"m", "m 2 None False True [q] False True None n"},
		{"m --bs 8 --rate 1e-4 --packing", "m 8 0.0001 True True [q] False True None n"},
		{"-b=4 m --no-cache --targets a b", "m 4 None False False [a b] False True None n"},
		{"m --targets a b --bf16 False", "m 2 None False True [a b] True True None n"},
		{"m --no-fused --pack --rate -1", "m 2 -1 True True [q] False False None n"},
		{"m --bs $N --kind x", "m ? None False True [q] False True ? n"},
		{"m --bs many --other 3", "m ? None False True [q] False True None n"},
		{"m --bs 8 --bs=16", "m 16 None False True [q] False True None n"},
	} {
		s, err := ReadStarted("train.py", []byte(parser), wordsOf(c.command), nil)
		if err != nil {
			t.Fatal(err)
		}
		if got := shown(s); got != c.want {
			t.Errorf("%s:\ngot  %s\nwant %s", c.command, got, c.want)
		}
	}
	for _, source := range []string{ // whose arguments are not followed
		strings.Replace(parser, "args =", "s = p.add_subparsers()\nargs =", 1),
		strings.Replace(parser, `"--bs", "-b"`, "name()", 1),
	} {
		s, err := ReadStarted("train.py", []byte(source), wordsOf("m"), nil)
		if err != nil {
			t.Fatal(err)
		}
		if got := shown(s); strings.Trim(got, "? ") != "" {
			t.Errorf("%s\ngot %s, want nothing", source, got)
		}
	}
	s, err := Read("train.py", []byte(parser), nil)
	if err != nil || strings.Trim(shown(s), "? ") != "" {
		t.Errorf("without a command line: %s, error %v", shown(s), err)
	}
}

// TestDataclasses holds what transformers' HfArgumentParser makes of a command line: fields of the source's own
// classes, and one configuration of a library for the rest.
func TestDataclasses(t *testing.T) {
	const source = `import transformers
from dataclasses import dataclass, field
@dataclass
class ModelArguments:
    model: str = field(default="m", metadata={"help": "h"})
    lora: bool = False
    must: int = field(metadata={})
@dataclass
class Settings(transformers.TrainingArguments):
    longest: int = field(default=512)
parser = transformers.HfArgumentParser((ModelArguments, Settings))
a, b = parser.parse_args_into_dataclasses()
show(a.model, a.lora, a.must, b.longest, b.bf16, b.size)
transformers.Trainer(args=b)
`
	for _, c := range []struct{ command, want string }{
		{"", "m False ? 512 ? ?"},
		{"--model x --lora --must 3 --bf16 True --size 4", "x True 3 512 True 4"},
		{"--lora False --longest=64 --size $N --bf16", "m False ? 64 True ?"},
		{"arguments.json", "? ? ? ? ? ?"},
	} {
		s, err := ReadStarted("train.py", []byte(source), append([]Argument{}, wordsOf(c.command)...), nil)
		if err != nil {
			t.Fatal(err)
		}
		s.Calls = s.Calls[:len(s.Calls)-1] // without the trainer
		if got := shown(s); got != c.want {
			t.Errorf("%s:\ngot  %s\nwant %s", c.command, got, c.want)
		}
	}
	s, err := ReadStarted("train.py", []byte(source), wordsOf("--bf16 True --longest 9"), nil)
	if err != nil {
		t.Fatal(err)
	}
	args := s.Calls[len(s.Calls)-1].Attribute("args")
	if args.Class != "transformers.TrainingArguments" || args.Attribute("bf16") == nil ||
		args.Attribute("longest") != nil {
		t.Errorf("the trainer's configuration is %v with %v", args.Class, args.Members)
	}
	for _, other := range []string{
		strings.Replace(source, "(ModelArguments, Settings)", "(transformers.SFTConfig, Settings)", 1),
		strings.Replace(source, "    longest:", "    def __post_init__(self):\n        pass\n    longest:", 1),
		strings.Replace(source, "(ModelArguments, Settings)", "classes()", 1),
	} {
		s, err := ReadStarted("train.py", []byte(other), wordsOf("--longest 9"), nil)
		if err != nil {
			t.Fatal(err)
		}
		s.Calls = s.Calls[:len(s.Calls)-1]
		if got := shown(s); strings.Trim(got, "? ") != "" {
			t.Errorf("%s\ngot %s, want nothing", other, got)
		}
	}
}

func wordsOf(command string) (list []Argument) {
	for w := range strings.FieldsSeq(command) {
		list = append(list, Argument{w, strings.HasPrefix(w, "$")})
	}
	return list
}

// shown returns the arguments of the last call.
func shown(s *Source) string {
	var list []string
	for _, v := range s.Calls[len(s.Calls)-1].Given {
		list = append(list, show(v))
	}
	return strings.Join(list, " ")
}

func show(v *Value) string {
	switch v.Kind {
	case None:
		return "None"
	case Bool:
		return strings.ToUpper(fmt.Sprint(v.Truth)[:1]) + fmt.Sprint(v.Truth)[1:]
	case Number:
		return fmt.Sprint(v.Number)
	case Text:
		return v.Text
	case List:
		var list []string
		for _, e := range v.Elements {
			list = append(list, show(e))
		}
		return "[" + strings.Join(list, " ") + "]"
	}
	return "?"
}

// TestTrlParser holds what TRL's parser makes of a command line with the classes of TRL's own scripts, and what its
// functions make of these.
func TestTrlParser(t *testing.T) {
	const source = `import torch
from dataclasses import dataclass
from trl import ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser, get_peft_config
from trl import get_quantization_config
@dataclass
class Own(ScriptArguments):
    note: str = "n"
def main(script, training, model):
    training.model_init_kwargs = dict(dtype=getattr(torch, model.dtype))
    adapter, quantized = get_peft_config(model), get_quantization_config(model)
    show(script.note, script.dataset_name, model.model_name_or_path, model.lora_r, training.packing,
         training.model_init_kwargs["dtype"] == torch.bfloat16, adapter.r, adapter.target_modules,
         quantized.bnb_4bit_quant_type)
if __name__ == "__main__":
    parser = TrlParser((Own, SFTConfig, ModelConfig))
    script, training, model, _ = parser.parse_args_and_config(return_remaining_strings=True)
    main(script, training, model)
`
	for _, c := range []struct{ command, want string }{
		{"", "n None None 16 ? ? ? ? ?"},
		{"--dataset_name d --note o --model_name_or_path m --packing --use_peft --lora_r 8 --lora_target_modules " +
			"q_proj v_proj --load_in_4bit --dtype bfloat16", "o d m 8 True True 8 [q_proj v_proj] nf4"},
		{"--config file.yaml", "? ? ? ? ? ? ? ? ?"}, // the file has more arguments
	} {
		command := append([]Argument{}, wordsOf(c.command)...)
		s, err := ReadStarted("train.py", []byte(source), command, nil, "trl", "peft")
		if err != nil {
			t.Fatal(err)
		}
		if got := shown(s); got != c.want {
			t.Errorf("%s:\ngot  %s\nwant %s", c.command, got, c.want)
		}
	}
}
