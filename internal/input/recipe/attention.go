package recipe

import (
	"fmt"
	"strings"
)

// Attentions are the names of attention implementations in transformers.
var Attentions = map[string]string{"eager": "eager", "sdpa": "sdpa", "flash_attention_2": "flash",
	"flash_attention_3": "flash", "kernels-community/flash-attn": "flash", "kernels-community/flash-attn2": "flash",
	"kernels-community/flash-attn3": "flash", "kernels-community/vllm-flash-attn3": "flash"}

// ReadAttention reads an attention implementation.
func (r *Reader) ReadAttention(key string) error {
	v := r.Find(key)
	if v == nil {
		return nil
	}
	name, _, _ := strings.Cut(v.Text, "@")
	name, _, _ = strings.Cut(name, ":")
	if r.To.Attention = Attentions[name]; r.To.Attention == "" {
		return r.Fault(key, fmt.Sprintf("is %s, an attention that is not planned yet", v),
			"plimsoll plans eager, sdpa, flash_attention_2 and flash_attention_3")
	}
	return nil
}
