"""Transformers' weights as their authors publish them, from those of diffusers: the other way than the converters of
`diffusers.loaders.single_file_utils`. Written from these and from the authors' checkpoints, without `train`'s names.

A line is `theirs = ours`: layers or weights, with {} for the number of a block, and + between those that are one below
the other in the published weight. ~ exchanges the halves of the rows.
"""

from __future__ import annotations

import torch

Weights = dict[str, torch.Tensor]

_ENDS = (".weight", ".bias", "")

SD3 = """
pos_embed = pos_embed.pos_embed
x_embedder.proj = pos_embed.proj
t_embedder.mlp.0 = time_text_embed.timestep_embedder.linear_1
t_embedder.mlp.2 = time_text_embed.timestep_embedder.linear_2
y_embedder.mlp.0 = time_text_embed.text_embedder.linear_1
y_embedder.mlp.2 = time_text_embed.text_embedder.linear_2
context_embedder = context_embedder
final_layer.linear = proj_out
final_layer.adaLN_modulation.1 = ~ norm_out.linear
joint_blocks.1.context_block.adaLN_modulation.1 = ~ transformer_blocks.1.norm1_context.linear
joint_blocks.{}.context_block.adaLN_modulation.1 = transformer_blocks.{}.norm1_context.linear
joint_blocks.{}.context_block.attn.qkv = transformer_blocks.{}.attn.add_q_proj + transformer_blocks.{}.attn.add_k_proj \
+ transformer_blocks.{}.attn.add_v_proj
joint_blocks.{}.context_block.attn.ln_q = transformer_blocks.{}.attn.norm_added_q
joint_blocks.{}.context_block.attn.ln_k = transformer_blocks.{}.attn.norm_added_k
joint_blocks.{}.context_block.attn.proj = transformer_blocks.{}.attn.to_add_out
joint_blocks.{}.context_block.mlp.fc1 = transformer_blocks.{}.ff_context.net.0.proj
joint_blocks.{}.context_block.mlp.fc2 = transformer_blocks.{}.ff_context.net.2
joint_blocks.{}.x_block.adaLN_modulation.1 = transformer_blocks.{}.norm1.linear
joint_blocks.{}.x_block.attn.qkv = transformer_blocks.{}.attn.to_q + transformer_blocks.{}.attn.to_k \
+ transformer_blocks.{}.attn.to_v
joint_blocks.{}.x_block.attn.ln_q = transformer_blocks.{}.attn.norm_q
joint_blocks.{}.x_block.attn.ln_k = transformer_blocks.{}.attn.norm_k
joint_blocks.{}.x_block.attn.proj = transformer_blocks.{}.attn.to_out.0
joint_blocks.{}.x_block.attn2.qkv = transformer_blocks.{}.attn2.to_q + transformer_blocks.{}.attn2.to_k \
+ transformer_blocks.{}.attn2.to_v
joint_blocks.{}.x_block.attn2.ln_q = transformer_blocks.{}.attn2.norm_q
joint_blocks.{}.x_block.attn2.ln_k = transformer_blocks.{}.attn2.norm_k
joint_blocks.{}.x_block.attn2.proj = transformer_blocks.{}.attn2.to_out.0
joint_blocks.{}.x_block.mlp.fc1 = transformer_blocks.{}.ff.net.0.proj
joint_blocks.{}.x_block.mlp.fc2 = transformer_blocks.{}.ff.net.2
"""
_LUMINA2_BLOCK = """
@.{}.attention.qkv = @.{}.attn.to_q + @.{}.attn.to_k + @.{}.attn.to_v
@.{}.attention.out = @.{}.attn.to_out.0
@.{}.attention.q_norm = @.{}.attn.norm_q
@.{}.attention.k_norm = @.{}.attn.norm_k
@.{}.attention_norm2 = @.{}.norm2
@.{}.ffn_norm1 = @.{}.ffn_norm1
@.{}.ffn_norm2 = @.{}.ffn_norm2
@.{}.feed_forward.w1 = @.{}.feed_forward.linear_1
@.{}.feed_forward.w2 = @.{}.feed_forward.linear_2
@.{}.feed_forward.w3 = @.{}.feed_forward.linear_3
"""
_LUMINA2_MODULATED = """
@.{}.attention_norm1 = @.{}.norm1.norm
@.{}.adaLN_modulation.1 = @.{}.norm1.linear
"""
LUMINA2 = """
x_embedder = x_embedder
cap_embedder.0 = time_caption_embed.caption_embedder.0
cap_embedder.1 = time_caption_embed.caption_embedder.1
t_embedder.mlp.0 = time_caption_embed.timestep_embedder.linear_1
t_embedder.mlp.2 = time_caption_embed.timestep_embedder.linear_2
final_layer.adaLN_modulation.1 = norm_out.linear_1
final_layer.linear = norm_out.linear_2
context_refiner.{}.attention_norm1 = context_refiner.{}.norm1
""" + "".join((_LUMINA2_BLOCK + (_LUMINA2_MODULATED if blocks != "context_refiner" else "")).replace("@", blocks)
              for blocks in ("layers", "noise_refiner", "context_refiner"))
AURAFLOW = """
register_tokens = register_tokens
positional_encoding = pos_embed.pos_embed
init_x_linear = pos_embed.proj
cond_seq_linear = context_embedder
t_embedder.mlp.0 = time_step_proj.linear_1
t_embedder.mlp.2 = time_step_proj.linear_2
final_linear = proj_out
modF.1 = ~ norm_out.linear
double_layers.{}.modX.1 = joint_transformer_blocks.{}.norm1.linear
double_layers.{}.modC.1 = joint_transformer_blocks.{}.norm1_context.linear
double_layers.{}.attn.w2q = joint_transformer_blocks.{}.attn.to_q
double_layers.{}.attn.w2k = joint_transformer_blocks.{}.attn.to_k
double_layers.{}.attn.w2v = joint_transformer_blocks.{}.attn.to_v
double_layers.{}.attn.w2o = joint_transformer_blocks.{}.attn.to_out.0
double_layers.{}.attn.w1q = joint_transformer_blocks.{}.attn.add_q_proj
double_layers.{}.attn.w1k = joint_transformer_blocks.{}.attn.add_k_proj
double_layers.{}.attn.w1v = joint_transformer_blocks.{}.attn.add_v_proj
double_layers.{}.attn.w1o = joint_transformer_blocks.{}.attn.to_add_out
double_layers.{}.mlpX.c_fc1 = joint_transformer_blocks.{}.ff.linear_1
double_layers.{}.mlpX.c_fc2 = joint_transformer_blocks.{}.ff.linear_2
double_layers.{}.mlpX.c_proj = joint_transformer_blocks.{}.ff.out_projection
double_layers.{}.mlpC.c_fc1 = joint_transformer_blocks.{}.ff_context.linear_1
double_layers.{}.mlpC.c_fc2 = joint_transformer_blocks.{}.ff_context.linear_2
double_layers.{}.mlpC.c_proj = joint_transformer_blocks.{}.ff_context.out_projection
single_layers.{}.modCX.1 = single_transformer_blocks.{}.norm1.linear
single_layers.{}.attn.w1q = single_transformer_blocks.{}.attn.to_q
single_layers.{}.attn.w1k = single_transformer_blocks.{}.attn.to_k
single_layers.{}.attn.w1v = single_transformer_blocks.{}.attn.to_v
single_layers.{}.attn.w1o = single_transformer_blocks.{}.attn.to_out.0
single_layers.{}.mlp.c_fc1 = single_transformer_blocks.{}.ff.linear_1
single_layers.{}.mlp.c_fc2 = single_transformer_blocks.{}.ff.linear_2
single_layers.{}.mlp.c_proj = single_transformer_blocks.{}.ff.out_projection
"""
FLUX2 = """
img_in = x_embedder
txt_in = context_embedder
time_in.in_layer = time_guidance_embed.timestep_embedder.linear_1
time_in.out_layer = time_guidance_embed.timestep_embedder.linear_2
guidance_in.in_layer = time_guidance_embed.guidance_embedder.linear_1
guidance_in.out_layer = time_guidance_embed.guidance_embedder.linear_2
double_stream_modulation_img.lin = double_stream_modulation_img.linear
double_stream_modulation_txt.lin = double_stream_modulation_txt.linear
single_stream_modulation.lin = single_stream_modulation.linear
final_layer.linear = proj_out
final_layer.adaLN_modulation.1 = ~ norm_out.linear
double_blocks.{}.img_attn.qkv = transformer_blocks.{}.attn.to_q + transformer_blocks.{}.attn.to_k \
+ transformer_blocks.{}.attn.to_v
double_blocks.{}.txt_attn.qkv = transformer_blocks.{}.attn.add_q_proj + transformer_blocks.{}.attn.add_k_proj \
+ transformer_blocks.{}.attn.add_v_proj
double_blocks.{}.img_attn.norm.query_norm.scale = transformer_blocks.{}.attn.norm_q.weight
double_blocks.{}.img_attn.norm.key_norm.scale = transformer_blocks.{}.attn.norm_k.weight
double_blocks.{}.txt_attn.norm.query_norm.scale = transformer_blocks.{}.attn.norm_added_q.weight
double_blocks.{}.txt_attn.norm.key_norm.scale = transformer_blocks.{}.attn.norm_added_k.weight
double_blocks.{}.img_attn.proj = transformer_blocks.{}.attn.to_out.0
double_blocks.{}.txt_attn.proj = transformer_blocks.{}.attn.to_add_out
double_blocks.{}.img_mlp.0 = transformer_blocks.{}.ff.linear_in
double_blocks.{}.img_mlp.2 = transformer_blocks.{}.ff.linear_out
double_blocks.{}.txt_mlp.0 = transformer_blocks.{}.ff_context.linear_in
double_blocks.{}.txt_mlp.2 = transformer_blocks.{}.ff_context.linear_out
single_blocks.{}.linear1 = single_transformer_blocks.{}.attn.to_qkv_mlp_proj
single_blocks.{}.linear2 = single_transformer_blocks.{}.attn.to_out
single_blocks.{}.norm.query_norm.scale = single_transformer_blocks.{}.attn.norm_q.weight
single_blocks.{}.norm.key_norm.scale = single_transformer_blocks.{}.attn.norm_k.weight
"""
_FLUX3_BLOCK = """
@.{}.q_proj = %.{}.attn.to_q
@.{}.k_proj = %.{}.attn.to_k
@.{}.v_proj = %.{}.attn.to_v
@.{}.attn_out = %.{}.attn.to_out.0
@.{}.norm.query_norm.scale = %.{}.attn.norm_q.weight
@.{}.norm.key_norm.scale = %.{}.attn.norm_k.weight
@.{}.mlp_in = %.{}.ff.linear_in
@.{}.mlp_out = %.{}.ff.linear_out
"""
FLUX3 = """
emb_in.image = x_embedders.image
emb_in.image_cond = x_embedders.image_cond
txt_in = context_embedder
time_in.in_layer = timestep_embedder.linear_1
time_in.out_layer = timestep_embedder.linear_2
early_stream_modulations.image.lin = early_stream_modulations.image.linear
early_stream_modulations.image_cond.lin = early_stream_modulations.image_cond.linear
early_stream_modulations.txt.lin = early_stream_modulations.txt.linear
single_stream_modulations.image.lin = single_stream_modulations.image.linear
single_stream_modulations.image_cond.lin = single_stream_modulations.image_cond.linear
single_stream_modulations.txt.lin = single_stream_modulations.txt.linear
final_layer.image.linear = proj_out
final_layer.image.adaLN_modulation.1 = ~ norm_out.linear
""" + "".join(_FLUX3_BLOCK.replace("@", theirs).replace("%", ours) for theirs, ours in (
    ("content_mode_blocks.image", "mode_blocks.image"), ("content_mode_blocks.image_cond", "mode_blocks.image_cond"),
    ("txt_mode_blocks", "txt_mode_blocks"), ("single_blocks", "single_transformer_blocks")))
ANIMA = """
x_embedder.proj.1 = patch_embed.proj
t_embedder.1.linear_1 = time_embed.t_embedder.linear_1
t_embedder.1.linear_2 = time_embed.t_embedder.linear_2
t_embedding_norm = time_embed.norm
final_layer.linear = proj_out
final_layer.adaln_modulation.1 = norm_out.linear_1
final_layer.adaln_modulation.2 = norm_out.linear_2
blocks.{}.mlp.layer1 = transformer_blocks.{}.ff.net.0.proj
blocks.{}.mlp.layer2 = transformer_blocks.{}.ff.net.2
""" + "".join(f"""
blocks.{{}}.adaln_modulation_{name}.1 = transformer_blocks.{{}}.norm{number}.linear_1
blocks.{{}}.adaln_modulation_{name}.2 = transformer_blocks.{{}}.norm{number}.linear_2
""" for number, name in ((1, "self_attn"), (2, "cross_attn"), (3, "mlp"))) + "".join(f"""
blocks.{{}}.{name}.q_proj = transformer_blocks.{{}}.attn{number}.to_q
blocks.{{}}.{name}.k_proj = transformer_blocks.{{}}.attn{number}.to_k
blocks.{{}}.{name}.v_proj = transformer_blocks.{{}}.attn{number}.to_v
blocks.{{}}.{name}.output_proj = transformer_blocks.{{}}.attn{number}.to_out.0
blocks.{{}}.{name}.q_norm = transformer_blocks.{{}}.attn{number}.norm_q
blocks.{{}}.{name}.k_norm = transformer_blocks.{{}}.attn{number}.norm_k
""" for number, name in ((1, "self_attn"), (2, "cross_attn")))
_ZIMAGE_BLOCK = """
@.{}.attention.qkv = @.{}.attention.to_q + @.{}.attention.to_k + @.{}.attention.to_v
@.{}.attention.out = @.{}.attention.to_out.0
@.{}.attention.q_norm = @.{}.attention.norm_q
@.{}.attention.k_norm = @.{}.attention.norm_k
@.{}.attention_norm1 = @.{}.attention_norm1
@.{}.attention_norm2 = @.{}.attention_norm2
@.{}.ffn_norm1 = @.{}.ffn_norm1
@.{}.ffn_norm2 = @.{}.ffn_norm2
@.{}.feed_forward.w1 = @.{}.feed_forward.w1
@.{}.feed_forward.w2 = @.{}.feed_forward.w2
@.{}.feed_forward.w3 = @.{}.feed_forward.w3
@.{}.adaLN_modulation.0 = @.{}.adaLN_modulation.0
"""
ZIMAGE = """
x_embedder = all_x_embedder.2-1
final_layer.linear = all_final_layer.2-1.linear
final_layer.adaLN_modulation.1 = all_final_layer.2-1.adaLN_modulation.1
cap_embedder.0 = cap_embedder.0
cap_embedder.1 = cap_embedder.1
t_embedder.mlp.0 = t_embedder.mlp.0
t_embedder.mlp.2 = t_embedder.mlp.2
x_pad_token = x_pad_token
cap_pad_token = cap_pad_token
""" + "".join(_ZIMAGE_BLOCK.replace("@", blocks) for blocks in ("layers", "noise_refiner", "context_refiner"))
_KREA2_BLOCK = """
@.{}.attn.wq.weight = &.{}.attn.to_q.weight
@.{}.attn.wk.weight = &.{}.attn.to_k.weight
@.{}.attn.wv.weight = &.{}.attn.to_v.weight
@.{}.attn.wo.weight = &.{}.attn.to_out.0.weight
@.{}.attn.gate.weight = &.{}.attn.to_gate.weight
@.{}.attn.qknorm.qnorm.scale = &.{}.attn.norm_q.weight
@.{}.attn.qknorm.knorm.scale = &.{}.attn.norm_k.weight
@.{}.mlp.gate.weight = &.{}.ff.gate.weight
@.{}.mlp.up.weight = &.{}.ff.up.weight
@.{}.mlp.down.weight = &.{}.ff.down.weight
@.{}.prenorm.scale = &.{}.norm1.weight
@.{}.postnorm.scale = &.{}.norm2.weight
"""
KREA2 = """
first = img_in
tmlp.0 = time_embed.linear_1
tmlp.2 = time_embed.linear_2
tproj.1 = time_mod_proj
txtmlp.0.scale = txt_in.norm.weight
txtmlp.1 = txt_in.linear_1
txtmlp.3 = txt_in.linear_2
txtfusion.projector = text_fusion.projector
last.norm.scale = final_layer.norm.weight
last.linear = final_layer.linear
last.modulation.lin = final_layer.scale_shift_table
blocks.{}.mod.lin = transformer_blocks.{}.scale_shift_table
""" + "".join(_KREA2_BLOCK.replace("@", theirs).replace("&", ours) for theirs, ours in (
    ("blocks", "transformer_blocks"), ("txtfusion.layerwise_blocks", "text_fusion.layerwise_blocks"),
    ("txtfusion.refiner_blocks", "text_fusion.refiner_blocks")))

# As ComfyUI fuses them.
QWENIMAGE21 = """
img_in = img_in
txt_in.text_norm = txt_in.text_norm
txt_in.in_layer = txt_in.in_layer
txt_in.out_layer = txt_in.out_layer
time_text_embed.timestep_embedder.linear_1 = time_text_embed.timestep_embedder.linear_1
time_text_embed.timestep_embedder.linear_2 = time_text_embed.timestep_embedder.linear_2
modulation.1 = modulation.1
norm_out.linear = norm_out.linear
proj_out = proj_out
transformer_blocks.{}.attn.to_q = transformer_blocks.{}.attn.to_q
transformer_blocks.{}.attn.to_k = transformer_blocks.{}.attn.to_k
transformer_blocks.{}.attn.to_v = transformer_blocks.{}.attn.to_v
transformer_blocks.{}.attn.to_out.0 = transformer_blocks.{}.attn.to_out.0
transformer_blocks.{}.attn.norm_q = transformer_blocks.{}.attn.norm_q
transformer_blocks.{}.attn.norm_k = transformer_blocks.{}.attn.norm_k
transformer_blocks.{}.img_mlp.out = transformer_blocks.{}.img_mlp.out
transformer_blocks.{}.img_mlp.gate_up = transformer_blocks.{}.img_mlp.gate_layer + transformer_blocks.{}.img_mlp.proj
"""

_DOUBLE = """
double_blocks.{}.img_attn.qkv = transformer_blocks.{}.attn.to_q + transformer_blocks.{}.attn.to_k \
+ transformer_blocks.{}.attn.to_v
double_blocks.{}.txt_attn.qkv = transformer_blocks.{}.attn.add_q_proj + transformer_blocks.{}.attn.add_k_proj \
+ transformer_blocks.{}.attn.add_v_proj
double_blocks.{}.img_attn.proj = transformer_blocks.{}.attn.to_out.0
double_blocks.{}.txt_attn.proj = transformer_blocks.{}.attn.to_add_out
"""
_FLUX_BLOCKS = _DOUBLE + """
double_blocks.{}.img_mlp.0 = transformer_blocks.{}.ff.net.0.proj
double_blocks.{}.img_mlp.2 = transformer_blocks.{}.ff.net.2
double_blocks.{}.txt_mlp.0 = transformer_blocks.{}.ff_context.net.0.proj
double_blocks.{}.txt_mlp.2 = transformer_blocks.{}.ff_context.net.2
double_blocks.{}.img_mod.lin = transformer_blocks.{}.norm1.linear
double_blocks.{}.txt_mod.lin = transformer_blocks.{}.norm1_context.linear
single_blocks.{}.linear1 = single_transformer_blocks.{}.attn.to_q + single_transformer_blocks.{}.attn.to_k \
+ single_transformer_blocks.{}.attn.to_v + single_transformer_blocks.{}.proj_mlp
single_blocks.{}.linear2 = single_transformer_blocks.{}.proj_out
single_blocks.{}.modulation.lin = single_transformer_blocks.{}.norm.linear
"""
# Of these only the linear layers.
FLUX = _FLUX_BLOCKS + """
img_in = x_embedder
txt_in = context_embedder
time_in.in_layer = time_text_embed.timestep_embedder.linear_1
time_in.out_layer = time_text_embed.timestep_embedder.linear_2
vector_in.in_layer = time_text_embed.text_embedder.linear_1
vector_in.out_layer = time_text_embed.text_embedder.linear_2
guidance_in.in_layer = time_text_embed.guidance_embedder.linear_1
guidance_in.out_layer = time_text_embed.guidance_embedder.linear_2
final_layer.linear = proj_out
final_layer.adaLN_modulation.1 = ~ norm_out.linear
"""
CHROMA = _FLUX_BLOCKS + """
img_in = x_embedder
txt_in = context_embedder
final_layer.linear = proj_out
distilled_guidance_layer.in_proj = distilled_guidance_layer.in_proj
distilled_guidance_layer.out_proj = distilled_guidance_layer.out_proj
distilled_guidance_layer.layers.{}.in_layer = distilled_guidance_layer.layers.{}.linear_1
distilled_guidance_layer.layers.{}.out_layer = distilled_guidance_layer.layers.{}.linear_2
"""


def published(weights: Weights, lines: str) -> Weights:
    """All of `weights` with the names of `lines`; without lines, as they are. A name of diffusers without a line is an
    error."""
    if not lines:
        return dict(weights)
    left, found = dict(weights), Weights()
    for line in lines.strip().splitlines():
        theirs, _, ours = line.partition(" = ")
        exchanged, parts = ours.startswith("~ "), ours.removeprefix("~ ").split(" + ")
        for number in range(4 if "{}" in line else 1):
            for end in _ENDS:
                names = [part.replace("{}", str(number)) + end for part in parts]
                if all(name in left for name in names):
                    value = torch.cat([left.pop(name) for name in names]) if len(names) > 1 else left.pop(names[0])
                    found[theirs.replace("{}", str(number)) + end] = (
                        value.roll(len(value) // 2, 0) if exchanged else value)
    assert not left, sorted(left)
    return found
